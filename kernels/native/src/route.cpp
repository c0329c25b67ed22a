// The experts of every token: those of its highest scores, and their weights.
//
// A token's scores are read twice, once for the highest and once for the sum of all exponentials.

#include <cmath>

#include <algorithm>
#include <limits>

#include "element.h"
#include "memory.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

constexpr float kNoSum = 1e-20f;  // is added to sums that are divided by, as in `pytorch/routing.py`

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

// How experts in groups are chosen, as `kernels/forms/routing.py` has it.
struct RoutingForm {
  int64_t n_experts;
  int64_t n_chosen;
  bool is_softmax;
  bool normalises;
  float factor;
  int64_t n_groups;
  int64_t n_chosen_groups;
  int64_t n_best;

  int64_t group_size() const { return n_experts / n_groups; }
};

// What one thread chooses with.
class Scratch {
 public:
  static int64_t n_bytes(const RoutingForm& form) {
    const int64_t n_bytes = 2 * form.n_experts * (sizeof(float) + sizeof(int64_t)) +
                            2 * form.n_experts * sizeof(float);
    return (n_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  }

  Scratch(char* memory, int64_t n_experts) {
    places = reinterpret_cast<int64_t*>(memory);
    groups = places + n_experts;
    scores = reinterpret_cast<float*>(groups + n_experts);
    compared = scores + n_experts;
    highest = compared + n_experts;
    of_groups = highest + n_experts;
  }

  int64_t* places;   // [n_experts], as all of them
  int64_t* groups;
  float* scores;
  float* compared;
  float* highest;
  float* of_groups;
};

// The scores of all experts: shares of one, or each by itself.
void score(const float* logits, const RoutingForm& form, float* scores) {
  const int64_t n = form.n_experts;
  if (!form.is_softmax) {
    for (int64_t i = 0; i < n; i += kLanes) {
      store_up_to(scores + i, sigmoid(load_up_to(logits + i, n - i)), n - i);
    }
    return;
  }
  const float most = *std::max_element(logits, logits + n);
  Floats sums{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats raised = exponentials(logits + i, n - i, most);
    sums += raised;
    store_up_to(scores + i, raised, n - i);
  }
  const float sum = sum_of_lanes(sums);
  for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

// Leaves minus infinity in the scores of experts that are in no chosen group.
void choose_groups(const RoutingForm& form, const Scratch& scratch) {
  const int64_t size = form.group_size();
  for (int64_t group = 0; group < form.n_groups; ++group) {
    choose(scratch.compared + group * size, size, form.n_best, scratch.places, scratch.highest);
    float sum = 0;
    for (int64_t i = 0; i < form.n_best; ++i) sum += scratch.highest[i];
    scratch.of_groups[group] = sum;
  }
  choose(scratch.of_groups, form.n_groups, form.n_chosen_groups, scratch.groups, scratch.highest);
  int64_t* end = scratch.groups + form.n_chosen_groups;
  for (int64_t group = 0; group < form.n_groups; ++group) {
    if (std::find(scratch.groups, end, group) != end) continue;
    std::fill_n(scratch.compared + group * size, size, -std::numeric_limits<float>::infinity());
  }
}

void route_in_groups(const float* logits, const float* bias, const RoutingForm& form,
                     const Scratch& scratch, int64_t* experts, float* weights) {
  score(logits, form, scratch.scores);
  for (int64_t i = 0; i < form.n_experts; ++i) {
    scratch.compared[i] = bias == nullptr ? scratch.scores[i] : scratch.scores[i] + bias[i];
  }
  if (form.n_groups > 1) choose_groups(form, scratch);
  choose(scratch.compared, form.n_experts, form.n_chosen, experts, scratch.highest);
  float sum = 0;
  for (int64_t i = 0; i < form.n_chosen; ++i) {
    weights[i] = scratch.scores[experts[i]];
    sum += weights[i];
  }
  const float total = form.normalises ? sum + kNoSum : 1;
  for (int64_t i = 0; i < form.n_chosen; ++i) weights[i] = weights[i] / total * form.factor;
}

}  // namespace
}  // namespace orcinus

// `logits` and `bias` are [n_tokens, n_experts] and [n_experts], the latter perhaps null; `experts` and
// `weights` are [n_tokens, n_chosen].
ORCINUS_EXPORT(orcinus::Status, route_in_groups, const float* logits, const float* bias,
               int64_t* experts, float* weights, int64_t n_tokens, int64_t n_experts,
               int64_t n_chosen, int64_t is_softmax, int64_t normalises, float factor,
               int64_t n_groups, int64_t n_chosen_groups, int64_t n_best) {
  using namespace orcinus;
  return status_of([&] {
    const RoutingForm form{n_experts, n_chosen, is_softmax != 0, normalises != 0,
                           factor,    n_groups, n_chosen_groups, n_best};
    const int64_t row_bytes = 16 * n_experts, n_bytes = Scratch::n_bytes(form);
    static thread_local Memory memory;
    char* scratch = memory.of(n_threads_for(n_tokens, row_bytes) * n_bytes);
    for_rows(n_tokens, row_bytes, [&](int64_t begin, int64_t end) {
      const Scratch mine(scratch + omp_get_thread_num() * n_bytes, n_experts);
      for (int64_t token = begin; token < end; ++token) {
        route_in_groups(logits + token * n_experts, bias, form, mine, experts + token * n_chosen,
                        weights + token * n_chosen);
      }
    });
  });
}

// `scores` are [n_tokens, n_experts], `experts` and `weights` (float32) [n_tokens, n_chosen].
ORCINUS_EXPORT(void, route, int64_t element, const void* scores, int64_t* experts, float* weights,
               int64_t n_tokens, int64_t n_experts, int64_t n_chosen, int64_t normalises) {
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
