// Operations on single elements: activations, sums, factors and caps. Each reads its elements once and
// writes them once, so memory is the limit.

#include "element.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

// Calls `row(token)` for every token, on as many threads as `n_bytes` of each token are worth.
template <class Row>
void for_each_token(int64_t n_tokens, int64_t n_bytes, const Row& row) {
  for_rows(n_tokens, n_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) row(token);
  });
}

// Stores `function` of the vectors of `x`, [n_tokens, size], in `out`, which may be `x`.
template <class T, class Out, class Function>
void map(const void* x, void* out, int64_t n_tokens, int64_t size, const Function& function) {
  for_each_token(n_tokens, size * static_cast<int64_t>(sizeof(T) + sizeof(Out)), [&](int64_t token) {
    const T* from = static_cast<const T*>(x) + token * size;
    Out* to = static_cast<Out*>(out) + token * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      store_up_to(to + i, function(load_up_to(from + i, size - i)), size - i);
    }
  });
}

template <class Function>
void map_in_place(int64_t element, void* x, int64_t n_tokens, int64_t size,
                  const Function& function) {
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    map<T, T>(x, x, n_tokens, size, function);
  });
}

}  // namespace
}  // namespace orcinus

// All tensors are [n_tokens, size].

ORCINUS_EXPORT(void, relu, int64_t element, void* x, int64_t n_tokens, int64_t size) {
  using namespace orcinus;
  map_in_place(element, x, n_tokens, size,
               [](Floats some) { return select(some < 0.0f, Floats{}, some); });
}

ORCINUS_EXPORT(void, scale, int64_t element, void* x, int64_t n_tokens, int64_t size,
               float factor) {
  using namespace orcinus;
  map_in_place(element, x, n_tokens, size, [=](Floats some) { return some * factor; });
}

// x += factor * y, where the product is not rounded to the element type.
ORCINUS_EXPORT(void, add_scaled, int64_t element, void* x, const void* y, int64_t n_tokens,
               int64_t size, float factor) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_token(n_tokens, 3 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t token) {
      T* to = static_cast<T*>(x) + token * size;
      const T* from = static_cast<const T*>(y) + token * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t n = size - i;
        store_up_to(to + i, load_up_to(to + i, n) + load_up_to(from + i, n) * factor, n);
      }
    });
  });
}

// Writes cap * tanh(x / cap) as float32.
ORCINUS_EXPORT(void, soft_cap, int64_t element, const void* x, void* out, int64_t n_tokens,
               int64_t size, float cap) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    map<typename decltype(type)::type, float>(
        x, out, n_tokens, size, [=](Floats some) { return cap * orcinus::tanh(some / cap); });
  });
}
