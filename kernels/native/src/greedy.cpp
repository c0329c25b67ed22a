// The argmax of every row of logits, in one pass that also finds numbers that are not finite.
//
// Reads every logit once, with 5 operations for a vector of them, each of which waits for the one before
// it; so several vectors go side by side.

#include <cmath>

#include "element.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

// The largest of some logits in each lane, and where they are.
struct Largest {
  Floats largest = splat(-INFINITY);
  Ints place{};    // of the vector that each lane's largest is from
  Floats zeros{};  // 0 * x, which is NaN if x is not finite

  // Looks at the first `n` logits of the vector at `place_of_some`.
  void add(Floats some, int64_t place_of_some, int32_t n) {
    zeros += 0.0f * some;
    if (n < kLanes) some = select(lane_indices() < n, some, largest);
    const Ints is_larger = some > largest;
    place = is_larger ? splat(static_cast<int32_t>(place_of_some)) : place;
    largest = select(is_larger, some, largest);
  }
};

constexpr int kSideBySide = 4;

// Returns the first of the largest, or -1 if any is NaN or infinite.
template <class T>
int64_t greedy(const T* logits, int64_t size) {
  Largest parts[kSideBySide];
  int64_t at = 0;
  for (; at + kSideBySide * kLanes <= size; at += kSideBySide * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kSideBySide; ++i) {
      const int64_t place = at + i * kLanes;
      parts[i].add(load_up_to(logits + place, kLanes), place, kLanes);
    }
  }
  for (; at < size; at += kLanes) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(kLanes, size - at));
    parts[0].add(load_up_to(logits + at, n), at, n);
  }

  float zero = 0, most = -INFINITY;
  for (const Largest& part : parts) {
    zero += sum_of_lanes(part.zeros);
    most = std::max(most, largest_of_lanes(part.largest));
  }
  if (zero != 0.0f) return -1;
  int64_t first = size;
  for (const Largest& part : parts) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (part.largest[lane] == most) first = std::min<int64_t>(first, part.place[lane] + lane);
    }
  }
  return first;
}

}  // namespace
}  // namespace orcinus

ORCINUS_EXPORT(void, greedy, int64_t element, const void* logits, int64_t stride, int64_t n_rows,
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
