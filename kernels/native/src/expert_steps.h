// Gates, and the mixtures of experts that have them; `look_up_steps.h` says what steps are.

#pragma once

#include <algorithm>
#include <cstring>

#include "program.h"
#include "threads.h"

namespace orcinus {

enum class Gate : int64_t { kSilu, kGeluTanh, kClamp };

struct GateForm {
  Gate function;
  float slope;
  float limit;
  ORCINUS_FIELDS(GateForm, function, slope, limit)

  void apply(int64_t element, const void* x, void* out, int64_t n_tokens, int64_t size) const {
    if (function == Gate::kSilu) {
      orcinus_silu_and_mul(element, x, out, n_tokens, size);
    } else if (function == Gate::kGeluTanh) {
      orcinus_gelu_and_mul(element, x, out, n_tokens, size);
    } else {
      orcinus_clamp_and_mul(element, x, out, n_tokens, size, slope, limit);
    }
  }
};

struct ApplyGate {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  GateForm form;
  Place out;
  ORCINUS_FIELDS(ApplyGate, x, form, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    form.apply(from.element, from.data, to.data, batch.n_rows(from), to.width);
  }
};

struct Route {
  static constexpr auto kKind = &Seconds::other;
  Place scores;
  int64_t normalises;
  Place experts;
  Place weights;
  ORCINUS_FIELDS(Route, scores, normalises, experts, weights)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[scores];
    const Buffer& to = batch.buffers[experts];
    orcinus_route(from.element, from.data, reinterpret_cast<int64_t*>(to.data),
                  reinterpret_cast<float*>(batch.buffers[weights].data), batch.n_rows(from),
                  from.width, to.width, normalises);
  }
};

struct RoutingForm {
  int64_t n_chosen;
  int64_t is_softmax;
  int64_t normalises;
  float factor;
  int64_t n_groups;
  int64_t n_chosen_groups;
  int64_t n_best;
  Array bias;  // perhaps none
  ORCINUS_FIELDS(RoutingForm, n_chosen, is_softmax, normalises, factor, n_groups, n_chosen_groups,
                 n_best, bias)
};

struct RouteInGroups {
  static constexpr auto kKind = &Seconds::other;
  Place logits;
  RoutingForm form;
  Place experts;
  Place weights;
  ORCINUS_FIELDS(RouteInGroups, logits, form, experts, weights)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[logits];
    check(orcinus_route_in_groups(
        reinterpret_cast<const float*>(from.data), static_cast<const float*>(form.bias.data),
        reinterpret_cast<int64_t*>(batch.buffers[experts].data),
        reinterpret_cast<float*>(batch.buffers[weights].data), batch.n_rows(from), from.width,
        form.n_chosen, form.is_softmax, form.normalises, form.factor, form.n_groups,
        form.n_chosen_groups, form.n_best));
  }
};

// The first half of a gated MLP.
struct Gated {
  Weight weight;
  Array bias;     // perhaps none
  GateForm form;  // not used by a matrix that gates by itself
  ORCINUS_FIELDS(Gated, weight, bias, form)

  void run(int64_t element, const char* x, char* both, char* out, int64_t n) const {
    if (weight.finish != Finish::kNone) {
      weight.multiply(element, x, nullptr, nullptr, out, n);
    } else {
      weight.multiply(element, x, bias.data, nullptr, both, n);
      form.apply(element, both, out, n, weight.n_out / 2);
    }
  }
};

struct Expert {
  Gated gate_up;
  Weight down;
  Array down_bias;  // perhaps none
  ORCINUS_FIELDS(Expert, gate_up, down, down_bias)
};

struct Experts {
  const Expert* first;
  int64_t n;
  ORCINUS_FIELDS(Experts, first, n)
};

// sums[tokens[i]] += rows[i] * its share, for the `n` tokens of one expert. Products are rounded.
template <class T>
void add_shares(const T* rows, const int64_t* places, const float* shares, float* sums, int64_t n,
                int64_t n_chosen, int64_t size) {
  for_rows(n, size * static_cast<int64_t>(sizeof(T) + 8), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = rows + row * size;
      float* to = sums + places[row] / n_chosen * size;
      const float share = shares[places[row]];
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t left = size - i;
        store_up_to(to + i, load_up_to(to + i, left) + load_up_to(from + i, left) * share, left);
      }
    }
  });
}

struct RunExperts {
  static constexpr auto kKind = &Seconds::linear;
  Place x;
  Place experts;
  Place weights;
  Experts each;
  Place gathered;
  Place both;
  Place inner;
  Place outer;
  Place sums;
  Place out;
  ORCINUS_FIELDS(RunExperts, x, experts, weights, each, gathered, both, inner, outer, sums, out)

  // Places of `chosen` in the order of their experts, and behind them where the places of each begin.
  const int64_t* sorted(const int64_t* chosen, int64_t n) const {
    thread_local Memory memory;
    auto* places = reinterpret_cast<int64_t*>(memory.of((n + each.n + 1) * sizeof(int64_t)));
    int64_t* begins = places + n;
    std::fill(begins, begins + each.n + 1, 0);
    for (int64_t i = 0; i < n; ++i) ++begins[chosen[i] + 1];
    for (int64_t i = 0; i < each.n; ++i) begins[i + 1] += begins[i];
    for (int64_t i = 0; i < n; ++i) places[begins[chosen[i]]++] = i;
    for (int64_t i = each.n; i > 0; --i) begins[i] = begins[i - 1];
    begins[0] = 0;
    return places;
  }

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    const Buffer& choice = batch.buffers[experts];
    const int64_t n_tokens = batch.n_rows(from), n_chosen = choice.width;
    const int64_t n = n_tokens * n_chosen, n_bytes = from.row_bytes();
    const int64_t* places = sorted(reinterpret_cast<const int64_t*>(choice.data), n);
    const int64_t* begins = places + n;
    const auto data = [&](Place place) { return batch.buffers[place].data; };
    auto* total = reinterpret_cast<float*>(data(sums));
    std::memset(total, 0, n_tokens * from.width * sizeof(float));
    for (int64_t i = 0; i < each.n; ++i) {
      const int64_t* mine = places + begins[i];
      const int64_t n_mine = begins[i + 1] - begins[i];
      if (n_mine == 0) continue;
      for (int64_t row = 0; row < n_mine; ++row) {
        std::memcpy(data(gathered) + row * n_bytes, from.data + mine[row] / n_chosen * n_bytes,
                    n_bytes);
      }
      const Expert& expert = each.first[i];
      expert.gate_up.run(from.element, data(gathered), data(both), data(inner), n_mine);
      expert.down.multiply(from.element, data(inner), expert.down_bias.data, nullptr, data(outer),
                           n_mine);
      with_element(from.element, [&](auto type) {
        using T = typename decltype(type)::type;
        add_shares(reinterpret_cast<const T*>(data(outer)), mine,
                   reinterpret_cast<const float*>(data(weights)), total, n_mine, n_chosen,
                   from.width);
      });
    }
    with_element(to.element, [&](auto type) {
      using T = typename decltype(type)::type;
      T* rounded = reinterpret_cast<T*>(to.data);
      const int64_t n_all = n_tokens * from.width;
      for (int64_t i = 0; i < n_all; i += kLanes) {
        store_up_to(rounded + i, load_up_to(total + i, n_all - i), n_all - i);
      }
    });
  }
};

}  // namespace orcinus
