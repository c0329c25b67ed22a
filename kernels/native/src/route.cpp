// The experts of every token: those of its highest scores, and their weights.
//
// A token's scores are read twice, once for the highest and once for the sum of all exponentials.

#include <cmath>

#include "element.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

// Keeps the `n_chosen` highest scores so far in order, with their experts. A NaN is never higher than
// anything, so whatever the scores are, every expert is chosen at most once.
template <class T>
void choose(const T* scores, int64_t n_experts, int64_t n_chosen, int64_t* experts, float* highest) {
  int64_t n_kept = 0;
  for (int64_t expert = 0; expert < n_experts; ++expert) {
    const float score = load_some(scores + expert, 1)[0];
    if (n_kept == n_chosen && !(score > highest[n_kept - 1])) continue;
    if (n_kept < n_chosen) ++n_kept;
    int64_t place = n_kept - 1;
    for (; place > 0 && score > highest[place - 1]; --place) {
      highest[place] = highest[place - 1];
      experts[place] = experts[place - 1];
    }
    highest[place] = score;
    experts[place] = expert;
  }
}

// e^(score - most) of the vector that begins at `scores`; 0 from the n-th on.
template <class T>
Floats exponentials(const T* scores, int64_t n, float most) {
  const Floats raised = exp2((load_up_to(scores, n) - most) * kLog2E);
  return n < kLanes ? select(lane_indices() < static_cast<int32_t>(n), raised, Floats{}) : raised;
}

template <class T>
void route(const T* scores, int64_t n_experts, int64_t n_chosen, bool normalises, int64_t* experts,
           float* weights) {
  choose(scores, n_experts, n_chosen, experts, weights);
  const float most = weights[0];
  Floats sums{};
  for (int64_t i = 0; i < n_experts; i += kLanes) {
    sums += exponentials(scores + i, n_experts - i, most);
  }
  float sum = sum_of_lanes(sums), sum_of_chosen = 0;
  for (int64_t i = 0; i < n_chosen; ++i) {
    weights[i] = exponentials(weights + i, 1, most)[0] / sum;
    sum_of_chosen += weights[i];
  }
  if (!normalises) return;
  for (int64_t i = 0; i < n_chosen; ++i) weights[i] /= sum_of_chosen;
}

}  // namespace
}  // namespace orcinus

// `scores` are [n_tokens, n_experts], `experts` and `weights` (float32) [n_tokens, n_chosen].
extern "C" void orcinus_route(int64_t element, const void* scores, int64_t* experts, float* weights,
                              int64_t n_tokens, int64_t n_experts, int64_t n_chosen,
                              int64_t normalises) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* rows = static_cast<const T*>(scores);
    for_rows(n_tokens, 8 * n_experts, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        route(rows + token * n_experts, n_experts, n_chosen, normalises != 0,
              experts + token * n_chosen, weights + token * n_chosen);
      }
    });
  });
}
