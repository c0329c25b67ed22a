// Tells Python the layout of everything that it shares with the library, see `layout.h`.

#include "layout.h"

#include "element.h"
#include "groups.h"
#include "memory.h"
#include "operations.h"
#include "steps.h"

namespace orcinus {
namespace {

void tell_numbers(Layout& layout) {
  layout.tell_number("Element", "float32", kFloat32);
  layout.tell_number("Element", "bfloat16", kBFloat16);
  layout.tell_number("Status", "no_memory", kNoMemory);
  layout.tell_number("Finish", "none", Finish::kNone);
  layout.tell_number("Finish", "silu", Finish::kSilu);
  layout.tell_number("Finish", "gelu_tanh", Finish::kGeluTanh);
  layout.tell_number("Activation", "relu", Activation::kRelu);
  layout.tell_number("Activation", "gelu", Activation::kGelu);
  layout.tell_number("Activation", "gelu_tanh", Activation::kGeluTanh);
  layout.tell_number("Gate", "silu", Gate::kSilu);
  layout.tell_number("Gate", "gelu_tanh", Gate::kGeluTanh);
  layout.tell_number("Gate", "clamp", Gate::kClamp);
}

template <class... What>
void tell_steps(Layout& layout, Kinds<What...>) {
  int64_t number = 0;
  (layout.tell_number("STEPS", What::kName, number++), ...);
  (layout.tell_type<What>(), ...);
}

std::string told() {
  Layout layout;
  tell_numbers(layout);
  tell_steps(layout, Steps{});
  layout.tell_type<Step>();
  layout.tell_type<Batch>();
  layout.tell_type<Seconds>();
  layout.tell_type<Groups>();
  return layout.text();
}

}  // namespace
}  // namespace orcinus

// Returns the layout, which is only told when Python asks for it.
ORCINUS_EXPORT(const char*, layout) {
  static const std::string text = orcinus::told();
  return text.c_str();
}
