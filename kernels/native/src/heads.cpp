// Products of every head's vector with a matrix of the head's own, as latent attention needs them.
//
// A packed matrix is a row of panels of kPanel outputs. Within a panel, words of 32 bits follow each
// other step by step over the inputs, and in a step one word for each output: one float32 or two
// bfloat16. Inputs are read where they lie, and sums of a few tokens stay in registers.
//
// The sum of an output goes over inputs in their order, whatever the number of tokens and threads.
//
// Threads take heads, and of many tokens some at a time: a head's matrix is small (128 KiB where a
// head of 128 elements becomes a latent of 512) and stays in the second-level cache for them.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <omp.h>

#include "element.h"
#include "operations.h"
#include "vectors.h"

namespace orcinus {
namespace {

constexpr int kPanel = 64;  // outputs of a panel, for all instruction sets
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = kRegisters == 32 ? 4 : 2;
constexpr int64_t kTaskTokens = 48;  // of a thread at a time
static_assert(kPanel % (kBlockVectors * kLanes) == 0);

struct FloatDot {
  static constexpr int kInputs = 1;  // of a word
  static Floats add(Floats sum, Words weights, uint32_t inputs) {
    return fused((Floats)weights, (Floats)(inputs - Words{}), sum);
  }
};

#if defined(__AVX512BF16__)
struct BFloat16Dot {
  static constexpr int kInputs = 2;
  static Floats add(Floats sum, Words weights, uint32_t inputs) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights,
                                    (__m512bh)_mm512_set1_epi32(static_cast<int>(inputs)));
  }
};
#else
struct BFloat16Dot {
  static constexpr int kInputs = 2;
  static Floats add(Floats sum, Words weights, uint32_t inputs) {
    sum = FloatDot::add(sum, weights << 16, inputs << 16);
    return FloatDot::add(sum, weights & 0xffff0000, inputs & 0xffff0000);
  }
};
#endif

template <class T>
struct Job {
  const T* x;  // [n_tokens, n_heads, n_in]
  int64_t token_stride;
  int64_t head_stride;
  const uint32_t* weights;  // [n_heads, n_panels, n_steps, kPanel]
  T* out;                   // [n_tokens, n_heads, n_out]
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t n_tokens;
  int64_t n_heads;
  int64_t n_in;
  int64_t n_out;
};

// Sums of kRows tokens of a head and a part of a panel, which begins at output `first`.
template <class Dot, int kRows, class T>
void multiply(const Job<T>& job, const uint32_t* weights, int64_t token, int64_t head,
              int64_t first) {
  const T* x = job.x + token * job.token_stride + head * job.head_stride;
  Floats sums[kRows][kBlockVectors] = {};
  const auto add = [&](int64_t at, size_t n_bytes) __attribute__((always_inline)) {
    Words words[kBlockVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) words[v] = load_words(weights + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      uint32_t inputs = 0;
      std::memcpy(&inputs, x + r * job.token_stride + at, n_bytes);
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) sums[r][v] = Dot::add(sums[r][v], words[v], inputs);
    }
    weights += kPanel;
  };
  int64_t at = 0;
  for (; at + Dot::kInputs <= job.n_in; at += Dot::kInputs) add(at, sizeof(uint32_t));
  if (at < job.n_in) add(at, sizeof(T));
  for (int r = 0; r < kRows; ++r) {
    T* to = job.out + (token + r) * job.out_token_stride + head * job.out_head_stride;
    for (int v = 0; v < kBlockVectors; ++v) {
      const int64_t output = first + v * kLanes;
      if (output < job.n_out) store_up_to(to + output, sums[r][v], job.n_out - output);
    }
  }
}

template <class Dot, class T, int... n>
constexpr auto multiply_of(int n_rows, std::integer_sequence<int, n...>) {
  constexpr void (*table[])(const Job<T>&, const uint32_t*, int64_t, int64_t, int64_t) = {
      multiply<Dot, n + 1, T>...};
  return table[n_rows - 1];
}

template <class Dot, class T>
void heads(const Job<T>& job) {
  const int64_t n_steps = (job.n_in + Dot::kInputs - 1) / Dot::kInputs;
  const int64_t n_panels = (job.n_out + kPanel - 1) / kPanel;
  const int64_t n_parts = (job.n_tokens + kTaskTokens - 1) / kTaskTokens;
  const int64_t n_tasks = job.n_heads * n_parts;
  const auto run = [&](int64_t task) {
    const int64_t head = task / n_parts, part = task % n_parts;
    const int64_t end = job.n_tokens * (part + 1) / n_parts;
    for (int64_t output = 0; output < job.n_out; output += kBlockVectors * kLanes) {
      const int64_t panel = head * n_panels + output / kPanel;
      const uint32_t* weights = job.weights + panel * n_steps * kPanel + output % kPanel;
      int n_rows = 0;
      for (int64_t token = job.n_tokens * part / n_parts; token < end; token += n_rows) {
        n_rows = static_cast<int>(std::min<int64_t>(kBlockRows, end - token));
        multiply_of<Dot, T>(n_rows, std::make_integer_sequence<int, kBlockRows>())(
            job, weights, token, head, output);
      }
    }
  };
  if (n_tasks == 0) return;
  std::atomic<int64_t> n_claimed{0};
  const int n_threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), n_tasks));
#pragma omp parallel num_threads(n_threads)
  {
    int64_t task;
    while ((task = n_claimed.fetch_add(1, std::memory_order_relaxed)) < n_tasks) run(task);
  }
}

}  // namespace
}  // namespace orcinus

// Returns the number of outputs of a panel.
ORCINUS_EXPORT(int64_t, heads_panel) { return orcinus::kPanel; }

// Computes out[t, h] = weight[h] @ x[t, h] for x [n_tokens, n_heads, n_in] and `out` [n_tokens,
// n_heads, n_out], whose tokens and heads are some elements apart.
ORCINUS_EXPORT(void, heads, int64_t element, const void* x, int64_t token_stride,
               int64_t head_stride, const void* weights, void* out, int64_t out_token_stride,
               int64_t out_head_stride, int64_t n_tokens, int64_t n_heads, int64_t n_in,
               int64_t n_out) {
  using namespace orcinus;
  const auto* words = static_cast<const uint32_t*>(weights);
  if (element == kFloat32) {
    heads<FloatDot>(Job<float>{static_cast<const float*>(x), token_stride, head_stride, words,
                               static_cast<float*>(out), out_token_stride, out_head_stride,
                               n_tokens, n_heads, n_in, n_out});
  } else {
    heads<BFloat16Dot>(Job<BFloat16>{static_cast<const BFloat16*>(x), token_stride, head_stride,
                                     words, static_cast<BFloat16*>(out), out_token_stride,
                                     out_head_stride, n_tokens, n_heads, n_in, n_out});
  }
}
