// Gated DeltaNet between its projections; `kernels/pytorch/delta_net.py` says what is computed.
//
// A key head, with the value heads that share it, and a span are a piece of work: it needs nothing of
// the others and is one thread's. Within it tokens come one after the other. Each goes over the state
// twice, with 2 operations an element the first time and 3 the second, so a state must be near: stripes
// of it, 16 KiB for heads of 128 with AVX-512, stay in the first-level cache for a tile of tokens. A
// decode is limited by the memory that states are in, read and written once.
//
// A token's numbers are the same in any span and tile: sums over a head's keys go to as many partial
// sums as there are in `kSums`, by the place of the key, and nothing is summed over tokens.

#include <cmath>
#include <cstring>

#include "element.h"
#include "memory.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

constexpr int64_t kTile = 16;                // tokens whose heads are prepared at once
constexpr int kVectors = 2;                  // of a row of a stripe
constexpr int64_t kStripe = kVectors * kLanes;  // columns of a state
constexpr int kSums = 4;                     // so that no sum waits for the one before

struct Shape {
  int64_t n_key_heads;
  int64_t n_value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t kernel_size;

  int64_t group_size() const { return n_value_heads / n_key_heads; }
  int64_t n_keys() const { return n_key_heads * key_dim; }
  int64_t n_out() const { return n_value_heads * value_dim; }
  int64_t n_channels() const { return 2 * n_keys() + n_out(); }
  int64_t width() const { return n_channels() + n_out() + 2 * n_value_heads; }
  int64_t n_before() const { return kernel_size - 1; }
};

template <class T>
struct Layer {
  Shape shape;
  const T* projected;  // [n_tokens, width]
  T* inputs;           // [n_rows, n_before, n_channels]
  float* states;       // [n_rows, n_value_heads, key_dim, value_dim]
  T* out;              // [n_tokens, n_out]
  const float* conv;   // [kernel_size, n_channels]
  const float* decay_rate;
  const float* step_bias;
  const float* norm;
  float eps;
  float length_eps;
};

// A span and the row of states that it goes on with.
template <class T>
struct Span {
  const T* projected;
  T* inputs;
  float* states;
  T* out;
  int64_t n_tokens;
  bool is_new;  // nothing is before it
};

inline Floats load_there(const float* from, int64_t n) {
  return n > 0 ? load_up_to(from, n) : Floats{};
}

template <class T>
inline float number(const T* from) {
  return load_some(from, 1)[0];
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// What one thread computes with beside tensors.
class Scratch {
 public:
  static int64_t n_bytes(const Shape& shape) {
    const int64_t n = 2 * kTile * shape.key_dim + 2 * kTile * shape.value_dim +
                      shape.key_dim * kStripe + 2 * kTile;
    return (n * static_cast<int64_t>(sizeof(float)) + kLineBytes - 1) / kLineBytes * kLineBytes;
  }

  Scratch(char* memory, const Shape& shape) {
    stripe = reinterpret_cast<float*>(memory);
    q = stripe + shape.key_dim * kStripe;
    k = q + kTile * shape.key_dim;
    v = k + kTile * shape.key_dim;
    read = v + kTile * shape.value_dim;
    decay = read + kTile * shape.value_dim;
    beta = decay + kTile;
  }

  float* stripe;  // [key_dim, kStripe]
  float* q;       // [kTile, key_dim]
  float* k;       // [kTile, key_dim]
  float* v;       // [kTile, value_dim]
  float* read;    // [kTile, value_dim]
  float* decay;   // [kTile]
  float* beta;    // [kTile]
};

// Calls `row(i, i % kSums)` for all rows of a stripe, the second number known to the compiler.
template <class Row>
inline void for_keys(int64_t n, const Row& row) {
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
#pragma GCC unroll 4
    for (int sum = 0; sum < kSums; ++sum) row(i + sum, sum);
  }
#pragma GCC unroll 4
  for (int sum = 0; sum < kSums - 1; ++sum) {
    if (i + sum < n) row(i + sum, sum);
  }
}

// One token changes a stripe, [key_dim] rows that are `stride` apart, and reads from it.
inline void step(float* stripe, int64_t stride, int64_t key_dim, const float* q, const float* k,
                 const Floats (&v)[kVectors], float decay, float beta, Floats (&read)[kVectors]) {
  Floats sums[kSums][kVectors] = {};
  for_keys(key_dim, [&](int64_t i, int sum) {
    const Floats key = splat(k[i]);
    for (int c = 0; c < kVectors; ++c) {
      sums[sum][c] = fused(load(stripe + i * stride + c * kLanes), key, sums[sum][c]);
    }
  });
  Floats change[kVectors];
  for (int c = 0; c < kVectors; ++c) {
    const Floats known = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
    change[c] = (v[c] - known * decay) * beta;
  }
  Floats reads[kSums][kVectors] = {};
  for_keys(key_dim, [&](int64_t i, int sum) {
    const Floats key = splat(k[i]), query = splat(q[i]);
    for (int c = 0; c < kVectors; ++c) {
      float* place = stripe + i * stride + c * kLanes;
      const Floats changed = fused(key, change[c], load(place) * decay);
      store(place, changed);
      reads[sum][c] = fused(changed, query, reads[sum][c]);
    }
  });
  for (int c = 0; c < kVectors; ++c) {
    read[c] = (reads[0][c] + reads[1][c]) + (reads[2][c] + reads[3][c]);
  }
}

// The work of one thread on one key head of one span.
template <class T>
class Piece {
 public:
  Piece(const Layer<T>& layer, const Span<T>& span, int64_t key_head, const Scratch& scratch)
      : layer_(layer), shape_(layer.shape), span_(span), key_head_(key_head), scratch_(scratch) {}

  void run() {
    const int64_t first_head = key_head_ * shape_.group_size();
    if (span_.is_new) {
      const int64_t state_size = shape_.key_dim * shape_.value_dim;
      std::memset(span_.states + first_head * state_size, 0,
                  shape_.group_size() * state_size * sizeof(float));
    }
    for (int64_t begin = 0; begin < span_.n_tokens; begin += kTile) {
      const int64_t n = std::min(kTile, span_.n_tokens - begin);
      prepare(scratch_.q, query_channel(), begin, n, 1 / std::sqrt(static_cast<float>(shape_.key_dim)));
      prepare(scratch_.k, key_channel(), begin, n, 1);
      for (int64_t head = first_head; head < first_head + shape_.group_size(); ++head) {
        run_head(head, begin, n);
      }
    }
    keep_inputs(query_channel(), shape_.key_dim);
    keep_inputs(key_channel(), shape_.key_dim);
    keep_inputs(value_channel(first_head), shape_.group_size() * shape_.value_dim);
  }

 private:
  int64_t query_channel() const { return key_head_ * shape_.key_dim; }
  int64_t key_channel() const { return shape_.n_keys() + key_head_ * shape_.key_dim; }
  int64_t value_channel(int64_t head) const {
    return 2 * shape_.n_keys() + head * shape_.value_dim;
  }

  // The inputs of all channels at a place of the span, negative for those before it; null: zeros.
  const T* inputs_at(int64_t place) const {
    if (place >= 0) return span_.projected + place * shape_.width();
    if (span_.is_new) return nullptr;
    return span_.inputs + (shape_.n_before() + place) * shape_.n_channels();
  }

  // SiLU of the convolution of `size` channels from `channel` on, for `n` tokens from `begin` on.
  void convolve(float* to, int64_t channel, int64_t size, int64_t begin, int64_t n) const {
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t i = 0; i < size; i += kLanes) {
        Floats sum{};
        for (int64_t j = 0; j < shape_.kernel_size; ++j) {
          const T* inputs = inputs_at(begin + t - shape_.n_before() + j);
          if (inputs == nullptr) continue;
          const float* weights = layer_.conv + j * shape_.n_channels() + channel;
          sum = fused(load_up_to(inputs + channel + i, size - i), load_up_to(weights + i, size - i),
                      sum);
        }
        store_up_to(to + t * size + i, sum * sigmoid(sum), size - i);
      }
    }
  }

  // Queries or keys: convolved, scaled to length 1 and then by `factor`.
  void prepare(float* to, int64_t channel, int64_t begin, int64_t n, float factor) const {
    const int64_t size = shape_.key_dim;
    convolve(to, channel, size, begin, n);
    for (int64_t t = 0; t < n; ++t) {
      float* head = to + t * size;
      Floats squares{};
      for (int64_t i = 0; i < size; i += kLanes) {
        const Floats some = load_up_to(head + i, size - i);
        squares += some * some;
      }
      const float scale = factor / std::sqrt(sum_of_lanes(squares) + layer_.length_eps);
      for (int64_t i = 0; i < size; i += kLanes) {
        store_up_to(head + i, load_up_to(head + i, size - i) * scale, size - i);
      }
    }
  }

  void run_head(int64_t head, int64_t begin, int64_t n) {
    const int64_t key_dim = shape_.key_dim, value_dim = shape_.value_dim;
    convolve(scratch_.v, value_channel(head), value_dim, begin, n);
    const int64_t n_heads = shape_.n_value_heads;
    for (int64_t t = 0; t < n; ++t) {
      const T* b = span_.projected + (begin + t) * shape_.width() + shape_.n_channels() +
                   shape_.n_out() + head;
      const float rate = softplus(number(b + n_heads) + layer_.step_bias[head]);
      scratch_.decay[t] = std::exp(layer_.decay_rate[head] * rate);
      scratch_.beta[t] = 1 / (1 + std::exp(-number(b)));
    }
    float* state = span_.states + head * key_dim * value_dim;
    for (int64_t at = 0; at < value_dim; at += kStripe) {
      run_stripe(state + at, at, n);
    }
    for (int64_t t = 0; t < n; ++t) finish(head, begin + t, scratch_.read + t * value_dim);
  }

  // Runs the tokens of a tile on the columns of a state from `at` on.
  void run_stripe(float* state, int64_t at, int64_t n) {
    const int64_t key_dim = shape_.key_dim, value_dim = shape_.value_dim;
    const int64_t n_columns = std::min(kStripe, value_dim - at);
    // A single token goes over it twice where it is: copying it would be once more.
    const bool is_copied = n > 1 || n_columns < kStripe;
    float* stripe = is_copied ? scratch_.stripe : state;
    const int64_t stride = is_copied ? kStripe : value_dim;
    if (is_copied) {
      for (int64_t i = 0; i < key_dim; ++i) {
        for (int c = 0; c < kVectors; ++c) {
          store(stripe + i * kStripe + c * kLanes,
                load_there(state + i * value_dim + c * kLanes, n_columns - c * kLanes));
        }
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      const float* from = scratch_.v + t * value_dim + at;
      Floats v[kVectors], read[kVectors];
      for (int c = 0; c < kVectors; ++c) {
        v[c] = load_there(from + c * kLanes, n_columns - c * kLanes);
      }
      step(stripe, stride, key_dim, scratch_.q + t * key_dim, scratch_.k + t * key_dim, v,
           scratch_.decay[t], scratch_.beta[t], read);
      float* to = scratch_.read + t * value_dim + at;
      for (int c = 0; c < kVectors; ++c) {
        if (n_columns > c * kLanes) store_up_to(to + c * kLanes, read[c], n_columns - c * kLanes);
      }
    }
    if (is_copied) {
      for (int64_t i = 0; i < key_dim; ++i) {
        std::memcpy(state + i * value_dim, stripe + i * kStripe, n_columns * sizeof(float));
      }
    }
  }

  // Normalises what a head has read, and gates it.
  void finish(int64_t head, int64_t token, const float* read) const {
    const int64_t size = shape_.value_dim;
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats some = load_up_to(read + i, size - i);
      squares += some * some;
    }
    const float factor = 1 / std::sqrt(sum_of_lanes(squares) / size + layer_.eps);
    const T* z = span_.projected + token * shape_.width() + shape_.n_channels() + head * size;
    T* out = span_.out + token * shape_.n_out() + head * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t n = size - i;
      const Floats gate = load_up_to(z + i, n);
      const Floats normal = load_up_to(read + i, n) * factor * load_up_to(layer_.norm + i, n);
      store_up_to(out + i, normal * (gate * sigmoid(gate)), n);
    }
  }

  // Keeps the last inputs of `size` channels from `channel` on.
  void keep_inputs(int64_t channel, int64_t size) const {
    for (int64_t i = 0; i < shape_.n_before(); ++i) {
      T* to = span_.inputs + i * shape_.n_channels() + channel;
      const T* from = inputs_at(span_.n_tokens - shape_.n_before() + i);
      if (from == nullptr) {
        std::memset(to, 0, size * sizeof(T));
      } else {
        std::memcpy(to, from + channel, size * sizeof(T));  // of a later place than `to`
      }
    }
  }

  const Layer<T>& layer_;
  const Shape& shape_;
  const Span<T>& span_;
  int64_t key_head_;
  const Scratch& scratch_;
};

// Where the spans of a batch are, [n_spans] each.
struct Spans {
  const int64_t* first_tokens;
  const int64_t* n_tokens;
  const int64_t* rows;
  const int64_t* start_positions;
  int64_t n;
};

template <class T>
Span<T> span_of(const Layer<T>& layer, const Spans& spans, int64_t i) {
  const Shape& shape = layer.shape;
  const int64_t first = spans.first_tokens[i], row = spans.rows[i];
  return {layer.projected + first * shape.width(),
          layer.inputs + row * shape.n_before() * shape.n_channels(),
          layer.states + row * shape.n_out() * shape.key_dim,
          layer.out + first * shape.n_out(),
          spans.n_tokens[i],
          spans.start_positions[i] == 0};
}

template <class T>
void delta_net(const Layer<T>& layer, const Spans& spans) {
  const Shape& shape = layer.shape;
  const int64_t n_pieces = spans.n * shape.n_key_heads;
  const int64_t state_bytes = shape.n_out() * shape.key_dim * static_cast<int64_t>(sizeof(float));
  const int64_t n_useful = std::min(n_pieces, spans.n * state_bytes / kBytesPerThread);
  const int n_threads =
      static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), n_useful)));
  const int64_t n_bytes = Scratch::n_bytes(shape);
  static thread_local Memory memory;
  char* scratch = memory.of(n_threads * n_bytes);
#pragma omp parallel for schedule(dynamic) num_threads(n_threads)
  for (int64_t i = 0; i < n_pieces; ++i) {
    const Scratch mine(scratch + omp_get_thread_num() * n_bytes, shape);
    const Span<T> span = span_of(layer, spans, i / shape.n_key_heads);
    Piece<T>(layer, span, i % shape.n_key_heads, mine).run();
  }
}

}  // namespace
}  // namespace orcinus

ORCINUS_EXPORT(orcinus::Status, delta_net, int64_t element, const void* projected, void* inputs,
               float* states, const int64_t* first_tokens, const int64_t* n_tokens,
               const int64_t* rows, const int64_t* start_positions, void* out, int64_t n_spans,
               int64_t n_key_heads, int64_t n_value_heads, int64_t key_dim, int64_t value_dim,
               int64_t kernel_size, const float* conv, const float* decay_rate,
               const float* step_bias, const float* norm, float eps, float length_eps) {
  using namespace orcinus;
  return status_of([&] {
    with_element(element, [&](auto type) {
      using T = typename decltype(type)::type;
      const Layer<T> layer{{n_key_heads, n_value_heads, key_dim, value_dim, kernel_size},
                           static_cast<const T*>(projected),
                           static_cast<T*>(inputs),
                           states,
                           static_cast<T*>(out),
                           conv,
                           decay_rate,
                           step_bias,
                           norm,
                           eps,
                           length_eps};
      delta_net(layer, {first_tokens, n_tokens, rows, start_positions, n_spans});
    });
  });
}
