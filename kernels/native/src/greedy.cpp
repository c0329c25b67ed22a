// The most likely token of every row of logits, in one pass that also looks for numbers that are none.
//
// Reads every logit once, with 5 operations for a vector of them.

#include "element.h"
#include "threads.h"

namespace orcinus {
namespace {

// The first of the largest, or -1 if any is NaN or infinite.
template <class T>
int64_t greedy(const T* logits, int64_t size) {
  Floats largest = load_up_to(logits, size);
  if (size < kLanes) largest = select(lane_indices() < static_cast<int32_t>(size), largest, splat(largest[0]));
  Ints place{};  // of the vector that each lane's largest is from
  Floats zeros{};  // 0 * x, which is NaN if x is not finite
  for (int64_t i = 0; i < size; i += kLanes) {
    const auto n = static_cast<int32_t>(size - i);
    Floats some = load_up_to(logits + i, n);
    zeros += 0.0f * some;
    if (n < kLanes) some = select(lane_indices() < n, some, largest);
    const Ints is_larger = some > largest;
    place = is_larger ? splat(static_cast<int32_t>(i)) : place;
    largest = select(is_larger, some, largest);
  }
  if (sum_of_lanes(zeros) != 0.0f) return -1;
  const float most = largest_of_lanes(largest);
  int64_t first = size;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (largest[lane] == most) first = std::min<int64_t>(first, place[lane] + lane);
  }
  return first;
}

}  // namespace
}  // namespace orcinus

extern "C" void orcinus_greedy(int64_t element, const void* logits, int64_t stride, int64_t n_rows,
                               int64_t size, int64_t* tokens) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* rows = static_cast<const T*>(logits);
    for_rows(n_rows, size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) tokens[row] = greedy(rows + row * stride, size);
    });
  });
}
