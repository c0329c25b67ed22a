// A stage as a program: steps over buffers, in one call or in a few. It calls the operations of the
// other files in the order in which Python would, and computes next to nothing itself, so results are
// equal to the bit.
//
// A layer has eight operations or more. Python would have to fetch the interpreter from memory for each
// of them, because weights have gone through the caches since the one before.

#include <chrono>
#include <cstdint>

#include "program.h"
#include "steps.h"

namespace orcinus {
namespace {

// Adds the time since the last call to one kind.
class Stopwatch {
 public:
  void add_to(double& seconds) {
    const auto now = std::chrono::steady_clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

template <class What>
void run(const void* what, const Batch& batch, Stopwatch& watch, Seconds& seconds) {
  static_cast<const What*>(what)->run(batch);
  watch.add_to(seconds.*What::kKind);
}

using Run = void (*)(const void*, const Batch&, Stopwatch&, Seconds&);

template <class... What>
constexpr Run run_of(Kinds<What...>, int64_t kind) {
  constexpr Run table[] = {run<What>...};
  return table[kind];
}

// Counts the indices that are not in [0, limit).
int64_t n_outside(const int64_t* indices, int64_t n, int64_t limit) {
  int64_t n_wrong = 0;
  for (int64_t i = 0; i < n; ++i) n_wrong += indices[i] < 0 || indices[i] >= limit;
  return n_wrong;
}

}  // namespace
}  // namespace orcinus

using namespace orcinus;

// Returns how many tokens and positions of a batch are not in the tables, and how many sampled places
// not in the batch. With any of these no step may run.
ORCINUS_EXPORT(int64_t, layers_n_wrong, const Batch* batch) {
  int64_t n_wrong = n_outside(batch->positions, batch->n_tokens, batch->max_positions);
  if (batch->ids != nullptr) n_wrong += n_outside(batch->ids, batch->n_tokens, batch->max_ids);
  return n_wrong + n_outside(batch->sampled, batch->n_sampled, batch->n_tokens);
}

// Runs `n_steps` steps. Returns kDone, or kNoMemory if memory ran out on the way.
ORCINUS_EXPORT(orcinus::Status, layers, const Step* steps, int64_t n_steps, const Batch* batch,
               Seconds* seconds) {
  return status_of([&] {
    Stopwatch watch;
    for (const Step* step = steps; step < steps + n_steps; ++step) {
      run_of(Steps{}, step->kind)(step->what, *batch, watch, *seconds);
    }
  });
}
