// Steps that compute each row by itself; `look_up_steps.h` says what steps are.

#pragma once

#include "program.h"
#include "threads.h"

namespace orcinus {

struct RMSNorm {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Array weight;
  float eps;
  Place out;
  ORCINUS_FIELDS(RMSNorm, x, weight, eps, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    orcinus_rms_norm(from.element, from.data, weight.element, weight.data, batch.buffers[out].data,
                     batch.n_rows(from), from.width, 1, from.width, eps);
  }
};

// In place, and row by row: rows of the part are not dense, and the norm writes dense ones.
struct RMSNormPart {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  int64_t first;
  int64_t n;
  int64_t size;
  Array weight;
  float eps;
  ORCINUS_FIELDS(RMSNormPart, x, first, n, size, weight, eps)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    const int64_t row = of.row_bytes(), begin_of_part = row / of.width * first;
    for_rows(batch.n_rows(of), 2 * (row / of.width) * n * size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        char* part = of.data + i * row + begin_of_part;
        orcinus_rms_norm(of.element, part, weight.element, weight.data, part, 1, n * size, n, size,
                         eps);
      }
    });
  }
};

struct LayerNorm {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Array weight;
  Array bias;
  float eps;
  Place out;
  ORCINUS_FIELDS(LayerNorm, x, weight, bias, eps, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    orcinus_layer_norm(from.element, from.data, weight.element, weight.data, bias.data,
                       batch.buffers[out].data, batch.n_rows(from), from.width, 1, from.width, eps);
  }
};

struct Multiply {
  static constexpr auto kKind = &Seconds::linear;
  Place x;
  Weight weight;
  Array bias;      // perhaps none
  Place residual;  // negative: none
  Place out;
  ORCINUS_FIELDS(Multiply, x, weight, bias, residual, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    weight.multiply(from.element, from.data, bias.data,
                    residual < 0 ? nullptr : batch.buffers[residual].data, batch.buffers[out].data,
                    batch.n_rows(from));
  }
};

enum class Activation : int64_t { kRelu, kGelu, kGeluTanh };

struct Activate {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Activation function;
  ORCINUS_FIELDS(Activate, x, function)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    if (function == Activation::kRelu) {
      orcinus_relu(of.element, of.data, batch.n_rows(of), of.width);
    } else if (function == Activation::kGelu) {
      orcinus_gelu(of.element, of.data, of.data, batch.n_rows(of), of.width);
    } else {
      orcinus_gelu_tanh(of.element, of.data, of.data, batch.n_rows(of), of.width);
    }
  }
};

struct Add {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place y;
  float factor;
  ORCINUS_FIELDS(Add, x, y, factor)

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[x];
    orcinus_add_scaled(to.element, to.data, batch.buffers[y].data, batch.n_rows(to), to.width,
                       factor);
  }
};

struct Scale {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  float factor;
  ORCINUS_FIELDS(Scale, x, factor)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    orcinus_scale(of.element, of.data, batch.n_rows(of), of.width, factor);
  }
};

struct ScaleByPosition {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  int64_t size;
  Array factors;
  int64_t length;
  ORCINUS_FIELDS(ScaleByPosition, x, size, factors, length)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    const int64_t row = of.row_bytes();
    for_rows(batch.n_tokens, 2 * (row / of.width) * size, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        orcinus_scale(of.element, of.data + token * row, 1, size,
                      factor_of(batch.positions[token] / length));
      }
    });
  }

 private:
  float factor_of(int64_t place) const {
    float factor = 0;
    with_element(factors.element, [&](auto type) {
      using T = typename decltype(type)::type;
      factor = load_some(static_cast<const T*>(factors.data) + place, 1)[0];
    });
    return factor;
  }
};

struct Widen {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place out;
  ORCINUS_FIELDS(Widen, x, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    auto* to = reinterpret_cast<float*>(batch.buffers[out].data);
    for_rows(batch.n_rows(from), 6 * from.width, [&](int64_t begin, int64_t end) {
      with_element(from.element, [&](auto type) {
        using T = typename decltype(type)::type;
        const T* rows = reinterpret_cast<const T*>(from.data);
        for (int64_t i = begin * from.width, last = end * from.width; i < last; i += kLanes) {
          store_up_to(to + i, load_up_to(rows + i, last - i), last - i);
        }
      });
    });
  }
};

struct SoftCap {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  float cap;
  Place out;
  ORCINUS_FIELDS(SoftCap, x, cap, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    orcinus_soft_cap(from.element, from.data, batch.buffers[out].data, batch.n_rows(from),
                     from.width, cap);
  }
};

struct Mul {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place y;
  int64_t first;
  ORCINUS_FIELDS(Mul, x, y, first)

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[x];
    const Buffer& from = batch.buffers[y];
    with_element(to.element, [&](auto type) {
      using T = typename decltype(type)::type;
      const int64_t row_bytes = 3 * to.width * static_cast<int64_t>(sizeof(T));
      for_rows(batch.n_rows(to), row_bytes, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          T* factors = reinterpret_cast<T*>(to.data) + row * to.width;
          const T* others = reinterpret_cast<const T*>(from.data) + row * from.width + first;
          for (int64_t i = 0; i < to.width; i += kLanes) {
            const int64_t n = to.width - i;
            store_up_to(factors + i, load_up_to(factors + i, n) * load_up_to(others + i, n), n);
          }
        }
      });
    });
  }
};

struct SigmoidAndMul {
  static constexpr auto kKind = &Seconds::other;
  Place gates;
  int64_t first;
  Place x;
  ORCINUS_FIELDS(SigmoidAndMul, gates, first, x)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    const Buffer& gate = batch.buffers[gates];
    const char* begin = gate.data + gate.row_bytes() / gate.width * first;
    orcinus_sigmoid_and_mul(of.element, begin, gate.width, gate.width - first, of.data, of.data,
                            batch.n_rows(of), of.width);
  }
};

struct Greedy {
  static constexpr auto kKind = &Seconds::sampling;
  Place logits;
  ORCINUS_FIELDS(Greedy, logits)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[logits];
    orcinus_greedy(of.element, of.data, of.width, batch.n_rows(of), of.width, batch.argmax);
  }
};

}  // namespace orcinus
