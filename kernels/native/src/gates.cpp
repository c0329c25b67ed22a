// GeLU, and gates of gated MLPs, mostly act(gate) * up: about 20 operations an element, and 2 or 3 elements
// of memory.

#include "element.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

Floats silu(Floats x) { return x * sigmoid(x); }

// GeLU by its tanh approximation (Hendrycks & Gimpel, 2016), x / 2 * (1 + tanh(inner)): the same as
// x * sigmoid(2 * inner).
Floats gelu_tanh(Floats x) {
  constexpr float kRoot2OverPi = 0.797884560802865356f;
  return x * sigmoid(2 * kRoot2OverPi * (x + 0.044715f * x * x * x));
}

// GeLU itself, x times the share of a normal distribution below x. The share beyond |x| is known to
// 1e-7 (Abramowitz & Stegun, 7.1.26).
Floats gelu(Floats x) {
  constexpr float kRootOfHalf = 0.707106781186547524f;
  const Floats t = 1.0f / (1.0f + 0.3275911f * kRootOfHalf * select(x < 0.0f, -x, x));
  Floats p = fused(t, splat(1.061405429f), splat(-1.453152027f));
  p = fused(p, t, splat(1.421413741f));
  p = fused(p, t, splat(-0.284496736f));
  p = fused(p, t, splat(0.254829592f));
  const Floats beyond = 0.5f * p * t * exp2(-0.5f * kLog2E * x * x);
  return x * select(x < 0.0f, beyond, 1.0f - beyond);
}

// Stores `gate(gates, ups)`; `gate_up` is [n_tokens, 2 * size], `out` [n_tokens, size].
template <class T, class Gate>
void gate_and_mul(const T* gate_up, T* out, int64_t n_tokens, int64_t size, const Gate& gate) {
  for_rows(n_tokens, 3 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* gates = gate_up + token * 2 * size;
      const T* ups = gates + size;
      T* to = out + token * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t n = size - i;
        store_up_to(to + i, gate(load_up_to(gates + i, n), load_up_to(ups + i, n)), n);
      }
    }
  });
}

// `gate` has `gate_size` elements for each token, `size` or one for all; its rows are `stride` apart.
template <class T>
void sigmoid_and_mul(const T* gate, int64_t stride, int64_t gate_size, const T* x, T* out,
                     int64_t n_tokens, int64_t size) {
  for_rows(n_tokens, 3 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* gates = gate + token * stride;
      const Floats of_all = sigmoid(splat(load_some(gates, 1)[0]));
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t n = size - i;
        const Floats factor = gate_size == 1 ? of_all : sigmoid(load_up_to(gates + i, n));
        store_up_to(out + token * size + i, factor * load_up_to(x + token * size + i, n), n);
      }
    }
  });
}

template <class Activation>
void activate(int64_t element, const void* x, void* out, int64_t n_tokens, int64_t size,
              const Activation& activation) {
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    for_rows(n_tokens, 2 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* from = static_cast<const T*>(x) + token * size;
        T* to = static_cast<T*>(out) + token * size;
        for (int64_t i = 0; i < size; i += kLanes) {
          store_up_to(to + i, activation(load_up_to(from + i, size - i)), size - i);
        }
      }
    });
  });
}

template <class Gate>
void gate_and_mul(int64_t element, const void* gate_up, void* out, int64_t n_tokens, int64_t size,
                  const Gate& gate) {
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    gate_and_mul(static_cast<const T*>(gate_up), static_cast<T*>(out), n_tokens, size, gate);
  });
}

}  // namespace
}  // namespace orcinus

// `x` and `out` are [n_tokens, size].
ORCINUS_EXPORT(void, gelu, int64_t element, const void* x, void* out, int64_t n_tokens,
               int64_t size) {
  using namespace orcinus;
  activate(element, x, out, n_tokens, size, [](Floats some) { return gelu(some); });
}

ORCINUS_EXPORT(void, gelu_tanh, int64_t element, const void* x, void* out, int64_t n_tokens,
               int64_t size) {
  using namespace orcinus;
  activate(element, x, out, n_tokens, size, [](Floats some) { return gelu_tanh(some); });
}

ORCINUS_EXPORT(void, silu_and_mul, int64_t element, const void* gate_up, void* out,
               int64_t n_tokens, int64_t size) {
  using namespace orcinus;
  gate_and_mul(element, gate_up, out, n_tokens, size,
               [](Floats gates, Floats ups) { return silu(gates) * ups; });
}

ORCINUS_EXPORT(void, gelu_and_mul, int64_t element, const void* gate_up, void* out,
               int64_t n_tokens, int64_t size) {
  using namespace orcinus;
  gate_and_mul(element, gate_up, out, n_tokens, size,
               [](Floats gates, Floats ups) { return gelu_tanh(gates) * ups; });
}

// (up + 1) * gate * sigmoid(slope * gate), of gates that are at most `limit` and ups between
// `-limit` and `limit`; a NaN stays one.
ORCINUS_EXPORT(void, clamp_and_mul, int64_t element, const void* gate_up, void* out,
               int64_t n_tokens, int64_t size, float slope, float limit) {
  using namespace orcinus;
  gate_and_mul(element, gate_up, out, n_tokens, size, [=](Floats gates, Floats ups) {
    gates = select(gates > limit, splat(limit), gates);
    ups = select(ups > limit, splat(limit), select(ups < -limit, splat(-limit), ups));
    return (ups + 1.0f) * gates * sigmoid(slope * gates);
  });
}

ORCINUS_EXPORT(void, sigmoid_and_mul, int64_t element, const void* gate, int64_t stride,
               int64_t gate_size, const void* x, void* out, int64_t n_tokens, int64_t size) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    sigmoid_and_mul(static_cast<const T*>(gate), stride, gate_size, static_cast<const T*>(x),
                    static_cast<T*>(out), n_tokens, size);
  });
}
