// x @ weight.T with weights packed once, for everything from one token to thousands.
//
// A packed weight is a row of panels of kPanel outputs. Within a panel, words of 32 bits follow each
// other in the order in which they are used: one step of the sum over inputs after the other, and in
// a step one word for each output. A word is one float32, two bfloat16 or four int8 inputs, as the
// instruction takes them, so that one loop serves all of them. Inputs are brought into the same
// words, [step][token] for up to kTokens tokens at a time, which are then summed in registers. Where
// no instruction takes bfloat16, a word of weights becomes two of float32, and inputs are float32.
//
// The sum of an output goes over inputs in their order, whatever the number of tokens and threads.
//
// With few tokens the weights come from memory as fast as it gives them; with more, the next panel
// is fetched while this one is computed with. Threads take panels from their own half and, when that
// is done, from others', so that one which lost its core for a while does not hold up the rest.
//
// With int8 weights each token is brought to the range of int8 by a scale of its own, on the fly.
// Sums are then whole numbers, exact, and multiplied with both scales, the token's and the output's.
//
// Weights in groups (`groups.h`) are numbers of four or eight bits. A word of them becomes several of
// floats in registers, and tokens stay what they are. The sum of a group is multiplied with its scale
// when it is complete, so that numbers are exact until then.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include <omp.h>

#include "element.h"
#include "groups.h"
#include "memory.h"
#include "operations.h"
#include "rounded_inputs.h"
#include "threads.h"
#include "vectors.h"

namespace orcinus {
namespace {

constexpr int kTokens = (kRegisters - 4) / 2;   // tokens whose sums fit into registers
constexpr int64_t kInputBytes = 512 << 10;      // of inputs that stay in a second-level cache
constexpr int64_t kAheadBytes = 4096;           // how far ahead a stream of weights is fetched
constexpr int kMaxThreads = 256;

// Scales and starting sums of int8 weights; empty for others.
struct Scales {
  const int32_t* starts = nullptr;   // [n_panels * kPanel], what sums begin with
  const float* outputs = nullptr;    // [n_panels * kPanel]
  float* tokens = nullptr;           // [n_tokens], written when inputs are arranged
};

// Inputs as they are, and sums that are results.
struct PlainDot {
  using Sum = Floats;
  static constexpr bool kIsQuantised = false;
  static constexpr int kParts = 1;  // words of inputs for a word of weights
  static Words part(Words weights, int) { return weights; }
  static Sum start(const Scales&, int64_t) { return Sum{}; }
  static Floats result(Sum sum, const Scales&, int64_t, int64_t) { return sum; }
};

struct FloatDot : PlainDot {
  static constexpr int kInputs = 1;  // in a word of weights
  static Sum add(Sum sum, Words weights, uint32_t input) {
    float x;
    std::memcpy(&x, &input, sizeof x);
    return fused((Floats)weights, splat(x), sum);
  }
};

#if !defined(__AVX512BF16__)
// Each word of weights is used twice, as two float32, with a word of inputs each.
struct BFloat16Dot : FloatDot {
  static constexpr int kInputs = 2;
  static constexpr int kParts = 2;
  static Words part(Words weights, int i) { return i == 0 ? weights << 16 : weights & 0xffff0000; }
};
#else
struct BFloat16Dot : PlainDot {
  static constexpr int kInputs = 2;
  static Sum add(Sum sum, Words weights, uint32_t input) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights,
                                 (__m512bh)_mm512_set1_epi32(static_cast<int>(input)));
  }
};
#endif

#if defined(__AVX512VNNI__)
// Inputs are raised by 128, since the instruction takes them without sign. That adds a known number
// to the sum of an output: sums start with its negative, modulo 2^32.
struct Int8Dot {
  static constexpr int kInputs = 4;
  static constexpr bool kIsQuantised = true;
  static constexpr int kParts = 1;
  using Sum = Ints;
  static Words part(Words weights, int) { return weights; }
  static Sum start(const Scales& scales, int64_t output) {
    return (Sum)load_words(scales.starts + output);
  }
  static Sum add(Sum sum, Words weights, uint32_t input) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(static_cast<int>(input)),
                                    (__m512i)weights);
  }
  static Floats result(Sum sum, const Scales& scales, int64_t token, int64_t output) {
    const Floats wide = (Floats)_mm512_cvtepi32_ps((__m512i)sum);
    return wide * (scales.tokens[token] * load(scales.outputs + output));
  }
};
#endif

template <class Element>
struct Job {
  const Element* bias;      // [n_out] or null
  const Element* residual;  // [n_tokens, n_out] or null
  Element* out;             // [n_tokens, n_out], with a gate [n_tokens, n_out / 2]
  int64_t n_out;
  Finish finish;
  Scales scales = {};
};

// As in gates.cpp.
inline Floats gelu_tanh(Floats x) {
  constexpr float kRoot2OverPi = 0.797884560802865356f;
  return x * sigmoid(2 * kRoot2OverPi * (x + 0.044715f * x * x * x));
}

// Stores the two vectors of sums of a token that begin at output `first`.
template <class Element>
inline void finish(const Job<Element>& job, int64_t token, int64_t first, Floats low, Floats high) {
  // Gates are the first half of a panel, what they gate the second.
  if (job.finish != Finish::kNone) {
    const Floats gated = (job.finish == Finish::kSilu ? low * sigmoid(low) : gelu_tanh(low)) * high;
    const int64_t n_out = job.n_out / 2, at = first / 2;
    store_up_to(job.out + token * n_out + at, gated, static_cast<int>(n_out - at));
    return;
  }
  const Floats sums[2] = {low, high};
  for (int half = 0; half < 2; ++half) {
    const int64_t at = first + half * kLanes;
    const int n = static_cast<int>(std::min<int64_t>(kLanes, job.n_out - at));
    if (n <= 0) return;
    Floats sum = sums[half];
    if (job.bias) sum += load_up_to(job.bias + at, n);
    if (job.residual) sum += load_up_to(job.residual + token * job.n_out + at, n);
    store_up_to(job.out + token * job.n_out + at, sum, n);
  }
}

// Sums of n tokens and one panel, and lines of memory that are wanted soon.
template <class Dot, int n, class Element>
void multiply(const uint32_t* weights, const uint32_t* inputs, int64_t n_steps, const char* soon,
              int64_t bytes_per_step, const Job<Element>& job, int64_t token, int64_t first) {
  typename Dot::Sum sums[n][2];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    sums[i][0] = Dot::start(job.scales, first);
    sums[i][1] = Dot::start(job.scales, first + kLanes);
  }
  for (int64_t step = 0; step < n_steps; ++step) {
    __builtin_prefetch(soon, 0, 2);
    __builtin_prefetch(soon + kLineBytes, 0, 2);
    soon += bytes_per_step;
    const Words low = load_words(weights), high = load_words(weights + kLanes);
#pragma GCC unroll 2
    for (int part = 0; part < Dot::kParts; ++part) {
      const Words low_part = Dot::part(low, part), high_part = Dot::part(high, part);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) {
        sums[i][0] = Dot::add(sums[i][0], low_part, inputs[i]);
        sums[i][1] = Dot::add(sums[i][1], high_part, inputs[i]);
      }
      inputs += n;
    }
    weights += kPanel;
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    finish(job, token + i, first, Dot::result(sums[i][0], job.scales, token + i, first),
           Dot::result(sums[i][1], job.scales, token + i, first + kLanes));
  }
}

template <class Dot, class Element>
using Multiply = void (*)(const uint32_t*, const uint32_t*, int64_t, const char*, int64_t,
                          const Job<Element>&, int64_t, int64_t);

template <class Dot, class Element, int... n>
constexpr Multiply<Dot, Element> multiply_of(int count, std::integer_sequence<int, n...>) {
  constexpr Multiply<Dot, Element> table[] = {multiply<Dot, n + 1, Element>...};
  return table[count - 1];
}

// What multiplies with weights in groups: their form, and the values of their numbers.
template <class Dot, class Values>
struct GroupDot {
  Groups groups;
  Values values;
};

// Adds `kAtOnce` groups of a panel to the totals of n tokens. Groups that are computed at once do not
// wait for each other's sums; what is added to a total, and in which order, stays the same.
template <class Dot, class Values, int n, int kAtOnce>
void add_groups(const GroupDot<Dot, Values>& dot, const char* panel, const uint32_t* inputs,
                const float* input_sums, const char*& soon, int64_t bytes_per_step,
                Floats (&totals)[n][2]) {
  const Groups& groups = dot.groups;
  const int64_t n_steps = groups.n_steps(), group_bytes = groups.group_bytes();
  const int64_t scales_bytes = groups.scales_bytes();
  Floats sums[kAtOnce][n][2] = {};
  for (int64_t step = 0; step < n_steps; ++step) {
#pragma GCC unroll 4
    for (int group = 0; group < kAtOnce; ++group) {
      __builtin_prefetch(soon, 0, 2);
      __builtin_prefetch(soon + kLineBytes, 0, 2);
      soon += bytes_per_step;
      const char* words = panel + group * group_bytes + scales_bytes + step * kPanel * 4;
      const auto low = dot.values.unpack(load_words(words));
      const auto high = dot.values.unpack(load_words(words + kVectorBytes));
      const uint32_t* of_step = inputs + (group * n_steps + step) * Values::kParts * n;
#pragma GCC unroll 8
      for (int part = 0; part < Values::kParts; ++part) {
        const Words low_part = dot.values.part(low, part), high_part = dot.values.part(high, part);
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) {
          sums[group][i][0] = Dot::add(sums[group][i][0], low_part, of_step[part * n + i]);
          sums[group][i][1] = Dot::add(sums[group][i][1], high_part, of_step[part * n + i]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int group = 0; group < kAtOnce; ++group) {
    // What is fetched ahead has scales as well.
    __builtin_prefetch(soon, 0, 2);
    soon += bytes_per_step * scales_bytes / (kPanel * 4);
    const char* scales = panel + group * group_bytes;
    for (int half = 0; half < 2; ++half) {
      const Floats scale = load_scales(scales, groups.scale_bytes, half);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) {
        totals[i][half] = fused(sums[group][i][half], scale, totals[i][half]);
      }
      if (!groups.has_offsets) continue;
      const Floats offset =
          load_scales(scales + kPanel * groups.scale_bytes, groups.scale_bytes, half);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) {
        totals[i][half] = fused(splat(input_sums[group * n + i]), offset, totals[i][half]);
      }
    }
  }
}

// Totals of n tokens and one panel. Of few tokens, groups are computed several at once.
template <class Dot, class Values, int n>
void multiply_groups(const GroupDot<Dot, Values>& dot, const char* panel, const uint32_t* inputs,
                     int64_t n_groups, const char* soon, int64_t bytes_per_step, Floats* out) {
  constexpr int kAtOnce = n == 1 ? 4 : n <= 3 ? 2 : 1;
  const int64_t group_bytes = dot.groups.group_bytes();
  const int64_t n_words = dot.groups.n_steps() * Values::kParts;  // of a token's inputs in a group
  const auto* input_sums = reinterpret_cast<const float*>(inputs + n_groups * n_words * n);
  Floats totals[n][2] = {};
  int64_t group = 0;
  for (; group + kAtOnce <= n_groups; group += kAtOnce) {
    add_groups<Dot, Values, n, kAtOnce>(dot, panel + group * group_bytes,
                                        inputs + group * n_words * n, input_sums + group * n, soon,
                                        bytes_per_step, totals);
  }
  for (; group < n_groups; ++group) {
    add_groups<Dot, Values, n, 1>(dot, panel + group * group_bytes, inputs + group * n_words * n,
                                  input_sums + group * n, soon, bytes_per_step, totals);
  }
  std::memcpy(out, totals, sizeof totals);
}

template <class Dot, class Values>
using MultiplyGroups = void (*)(const GroupDot<Dot, Values>&, const char*, const uint32_t*, int64_t,
                                const char*, int64_t, Floats*);

template <class Dot, class Values, int... n>
constexpr MultiplyGroups<Dot, Values> multiply_groups_of(int count,
                                                         std::integer_sequence<int, n...>) {
  constexpr MultiplyGroups<Dot, Values> table[] = {multiply_groups<Dot, Values, n + 1>...};
  return table[count - 1];
}

// Words of inputs, [n_steps][n] for each block of n tokens.
template <class Element>
void arrange(const Element* x, int64_t n_in, int64_t n_steps, int n, uint32_t* out) {
  constexpr int kInputs = 4 / sizeof(Element);
  const int64_t n_whole = n_in / kInputs;
  int64_t step = 0;
  if constexpr (kTokens <= kLanes) {  // a square at a time
    // A row is stored whole, and what is too much of it overwritten by the next one; the last rows
    // are left to what follows, since behind the block is another.
    for (; step + 2 * kLanes <= n_whole; step += kLanes) {
      Words rows[kLanes] = {};
      for (int token = 0; token < n; ++token) {
        rows[token] = load_words(x + token * n_in + step * kInputs);
      }
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_words(out + (step + i) * n, rows[i]);
    }
  }
  for (; step < n_steps; ++step) {
    for (int token = 0; token < n; ++token) {
      const int64_t n_left = std::clamp<int64_t>(n_in - step * kInputs, 0, kInputs);
      uint32_t word = 0;
      std::memcpy(&word, x + token * n_in + step * kInputs, n_left * sizeof(Element));
      out[step * n + token] = word;
    }
  }
}

// Words of inputs, kept by a thread between calls.
struct Buffer {
  Memory memory;
  uint32_t* of(int64_t n) { return reinterpret_cast<uint32_t*>(memory.of(4 * n)); }
};

#if defined(__AVX512VNNI__)
constexpr float kLargest = 127.0f;     // of an int8 that has its negative
constexpr float kNothing = 1e-30f;     // all of a token below this is zero

// Writes a token as bytes, 128 for zero, and returns the scale of a step. The scale of a token that is
// not finite is not finite either, and neither are its results.
template <class Element>
float quantise(const Element* x, int64_t n_in, uint8_t* out) {
  Ints largest = {};  // magnitudes by their bits, in whose order NaN is above all
  for (int64_t i = 0; i < n_in; i += kLanes) {
    const Ints bits = (Ints)load_up_to(x + i, static_cast<int>(n_in - i)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const int32_t magnitude_bits = _mm512_reduce_max_epi32((__m512i)largest);
  float magnitude;
  std::memcpy(&magnitude, &magnitude_bits, sizeof magnitude);
  const float steps = magnitude < kNothing ? 0.0f : kLargest / magnitude;
  for (int64_t i = 0; i < n_in; i += kLanes) {
    const Floats scaled = load_up_to(x + i, static_cast<int>(n_in - i)) * steps;
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)scaled),
                                           _mm512_set1_epi32(128));
    const __m128i bytes = _mm512_cvtepi32_epi8(whole);
    std::memcpy(out + i, &bytes, sizeof bytes);
  }
  return magnitude / kLargest;
}

// Words of inputs as bytes, and the tokens' scales.
template <class Element>
void arrange_bytes(const Element* x, int64_t n_in, int64_t n_steps, int n, uint32_t* out,
                   float* scales) {
  thread_local Buffer buffer;
  const int64_t n_row = n_steps * Int8Dot::kInputs;
  auto* bytes = reinterpret_cast<uint8_t*>(buffer.of(n * n_steps + kLanes));
  for (int token = 0; token < n; ++token) {
    scales[token] = quantise(x + token * n_in, n_in, bytes + token * n_row);
  }
  arrange(bytes, n_row, n_steps, n, out);
}
#endif

// Words of inputs as float32, one for each.
inline void arrange_wide(const BFloat16* x, int64_t n_in, int64_t n_words, int n, uint32_t* out) {
  thread_local Buffer buffer;
  auto* wide = reinterpret_cast<float*>(buffer.of(n * n_words + kLanes));
  for (int token = 0; token < n; ++token) {
    float* row = wide + token * n_words;
    for (int64_t i = 0; i < n_in; i += kLanes) {
      store_up_to(row + i, load_up_to(x + token * n_in + i, n_in - i), n_in - i);
    }
    std::fill(row + n_in, row + n_words, 0.0f);
  }
  arrange(wide, n_words, n_words, n, out);
}

struct alignas(kLineBytes) Counter {
  std::atomic<int64_t> next;
};

// Tokens of a block of `n_rows` that is cut into blocks as even as can be.
struct Blocks {
  int64_t n_rows, n_blocks;
  explicit Blocks(int64_t rows) : n_rows(rows), n_blocks((rows + kTokens - 1) / kTokens) {}
  int64_t begin(int64_t block) const { return n_rows * block / n_blocks; }
};

// A matrix whose words are as `Dot` takes them.
template <class Dot, class Element>
class Panels {
 public:
  static constexpr bool kIsQuantised = Dot::kIsQuantised;

  Panels(const uint32_t* weights, int64_t n_in)
      : weights_(weights), n_in_(n_in), n_steps_((n_in + Dot::kInputs - 1) / Dot::kInputs) {}

  // Words of a token's inputs.
  int64_t n_words() const { return n_steps_ * Dot::kParts; }
  int64_t panel_bytes() const { return n_steps_ * kPanel * 4; }
  const char* panel(int64_t index) const {
    return reinterpret_cast<const char*>(weights_) + index * panel_bytes();
  }

  // Whether one token's inputs are taken as they are.
  bool takes_as_stored() const {
    return !kIsQuantised && Dot::kParts == 1 && n_in_ % Dot::kInputs == 0;
  }

  void arrange_inputs(const Element* x, int n, uint32_t* out, const Job<Element>& job,
                      int64_t token) const {
    if constexpr (kIsQuantised) {
      arrange_bytes(x, n_in_, n_steps_, n, out, job.scales.tokens + token);
    } else if constexpr (Dot::kParts > 1) {
      arrange_wide(x, n_in_, n_words(), n, out);
    } else {
      arrange(x, n_in_, n_steps_, n, out);
    }
  }

  void multiply(int n, int64_t panel_index, const uint32_t* inputs, const char* soon,
                int64_t bytes_per_step, const Job<Element>& job, int64_t token) const {
    multiply_of<Dot, Element>(n, std::make_integer_sequence<int, kTokens>())(
        reinterpret_cast<const uint32_t*>(panel(panel_index)), inputs, n_steps_, soon,
        bytes_per_step, job, token, panel_index * kPanel);
  }

 private:
  const uint32_t* weights_;
  int64_t n_in_, n_steps_;
};

// A matrix in groups. Behind the words of a token's inputs are the sums of its groups, if there are
// offsets, which are multiplied with these.
template <class Dot, class Values, class Element>
class GroupPanels {
 public:
  static constexpr bool kIsQuantised = false;

  GroupPanels(const char* weights, const Groups& groups, int64_t n_in)
      : weights_(weights), n_in_(n_in), n_groups_(groups.n_groups(n_in)),
        dot_{groups, Values(groups)} {}

  int64_t n_words() const {
    return n_groups_ * (group_words() + (dot_.groups.has_offsets ? 1 : 0));
  }
  int64_t panel_bytes() const { return n_groups_ * dot_.groups.group_bytes(); }
  const char* panel(int64_t index) const { return weights_ + index * panel_bytes(); }
  bool takes_as_stored() const { return false; }

  void arrange_inputs(const Element* x, int n, uint32_t* out, const Job<Element>&, int64_t) const {
    const int64_t n_inputs = n_groups_ * group_words();
    if constexpr (std::is_same_v<Element, BFloat16> && Values::kInputs == 1) {
      arrange_wide(x, n_in_, n_inputs, n, out);
    } else {
      arrange(x, n_in_, n_inputs, n, out);
    }
    if (!dot_.groups.has_offsets) return;
    auto* sums = reinterpret_cast<float*>(out + n_inputs * n);
    for (int64_t group = 0; group < n_groups_; ++group) {
      const int64_t begin = group * dot_.groups.size;
      const int64_t end = std::min(n_in_, begin + dot_.groups.size);
      for (int token = 0; token < n; ++token) {
        Floats sum = {};
        for (int64_t i = begin; i < end; i += kLanes) {
          sum += load_up_to(x + token * n_in_ + i, end - i);
        }
        sums[group * n + token] = sum_of_lanes(sum);
      }
    }
  }

  void multiply(int n, int64_t panel_index, const uint32_t* inputs, const char* soon,
                int64_t bytes_per_step, const Job<Element>& job, int64_t token) const {
    Floats totals[2 * kTokens];
    multiply_groups_of<Dot, Values>(n, std::make_integer_sequence<int, kTokens>())(
        dot_, panel(panel_index), inputs, n_groups_, soon, bytes_per_step, totals);
    for (int i = 0; i < n; ++i) {
      finish(job, token + i, panel_index * kPanel, totals[2 * i], totals[2 * i + 1]);
    }
  }

 private:
  int64_t group_words() const { return dot_.groups.n_steps() * Values::kParts; }

  const char* weights_;
  int64_t n_in_, n_groups_;
  GroupDot<Dot, Values> dot_;
};

// A matrix in groups of four bits, whose inputs are rounded to int8.
template <class Element>
class RoundedPanels {
 public:
  static constexpr bool kIsQuantised = false;

  RoundedPanels(const char* weights, const Groups& groups, int64_t n_in)
      : weights_(weights), groups_(groups), n_in_(n_in), n_groups_(groups.n_groups(n_in)) {}

  int64_t n_words() const { return n_groups_ * InputBlocks(groups_).group_words(); }
  int64_t panel_bytes() const { return n_groups_ * groups_.group_bytes(); }
  const char* panel(int64_t index) const { return weights_ + index * panel_bytes(); }
  bool takes_as_stored() const { return false; }

  void arrange_inputs(const Element* x, int n, uint32_t* out, const Job<Element>&, int64_t) const {
    for (int token = 0; token < n; ++token) {
      round_token(x + token * n_in_, n_in_, groups_, n, out + token);
    }
  }

  void multiply(int n, int64_t panel_index, const uint32_t* inputs, const char* soon,
                int64_t bytes_per_step, const Job<Element>& job, int64_t token) const {
    Floats totals[2 * kTokens];
    multiply_of(n, std::make_integer_sequence<int, kTokens>())(
        groups_, panel(panel_index), inputs, n_groups_, soon, bytes_per_step, totals);
    for (int i = 0; i < n; ++i) {
      finish(job, token + i, panel_index * kPanel, totals[2 * i], totals[2 * i + 1]);
    }
  }

 private:
  template <int... n>
  static constexpr auto multiply_of(int count, std::integer_sequence<int, n...>) {
    constexpr decltype(&multiply_rounded<1>) table[] = {multiply_rounded<n + 1>...};
    return table[count - 1];
  }

  const char* weights_;
  Groups groups_;
  int64_t n_in_, n_groups_;
};

template <class Matrix, class Element>
void linear(const Element* x, const Matrix& matrix, int64_t n_tokens, int64_t n_in,
            Job<Element> job) {
  if (n_tokens == 0) return;
  thread_local Buffer buffer, scales;
  if (Matrix::kIsQuantised) job.scales.tokens = reinterpret_cast<float*>(scales.of(n_tokens));
  const int64_t n_words = matrix.n_words();  // of inputs of a token
  const int64_t n_panels = (job.n_out + kPanel - 1) / kPanel;
  const int64_t most = std::max<int64_t>(kTokens, kInputBytes / (n_words * 4));
  const int64_t n_passes = (n_tokens + most - 1) / most;
  const bool is_arranged = n_tokens == 1 && matrix.takes_as_stored();
  uint32_t* arranged = is_arranged ? nullptr : buffer.of((n_tokens + n_passes) / n_passes * n_words);
  const int n_wanted = static_cast<int>(std::min<int64_t>(
      std::min(omp_get_max_threads(), kMaxThreads), std::max<int64_t>(1, n_panels)));
  Counter counters[kMaxThreads];
  std::atomic<bool> is_out_of_memory{false};
#pragma omp parallel num_threads(n_wanted)
  {
    const int n_threads = omp_get_num_threads(), me = omp_get_thread_num();
    for (int64_t pass = 0; pass < n_passes; ++pass) {
      const int64_t row = n_tokens * pass / n_passes;
      const Blocks blocks(n_tokens * (pass + 1) / n_passes - row);
      counters[me].next.store(n_panels * me / n_threads, std::memory_order_relaxed);
      const auto arrange_blocks = [&] {
        for (int64_t b = blocks.n_blocks * me / n_threads;
             b < blocks.n_blocks * (me + 1) / n_threads; ++b) {
          const int64_t begin = blocks.begin(b);
          const int n = static_cast<int>(blocks.begin(b + 1) - begin);
          matrix.arrange_inputs(x + (row + begin) * n_in, n, arranged + begin * n_words, job,
                                row + begin);
        }
      };
      if (!is_arranged && status_of(arrange_blocks) != kDone) {
        is_out_of_memory.store(true, std::memory_order_relaxed);
      }
#pragma omp barrier
      if (is_out_of_memory.load(std::memory_order_relaxed)) break;  // every thread does, after the barrier
      const uint32_t* inputs = is_arranged ? reinterpret_cast<const uint32_t*>(x) : arranged;
      for (int other = 0; other < n_threads; ++other) {
        const int whose = (me + other) % n_threads;
        const int64_t end = n_panels * (whose + 1) / n_threads;
        int64_t panel;
        while ((panel = counters[whose].next.fetch_add(1, std::memory_order_relaxed)) < end) {
          for (int64_t b = 0; b < blocks.n_blocks; ++b) {
            const int64_t begin = blocks.begin(b);
            const int n = static_cast<int>(blocks.begin(b + 1) - begin);
            // In each step two lines are fetched: of a block alone from a little ahead, of several
            // from the next panel, in the second one again what the first could not get.
            const char* soon = matrix.panel(panel);
            int64_t stride = 0;
            if (blocks.n_blocks == 1) {
              soon += kAheadBytes;
              stride = 2 * kLineBytes;
            } else if (b < 2) {
              soon += matrix.panel_bytes();
              stride = 2 * kLineBytes;
            }
            matrix.multiply(n, panel, inputs + begin * n_words, soon, stride, job, row + begin);
          }
        }
      }
      if (pass + 1 < n_passes) {
#pragma omp barrier
      }
    }
  }
  if (is_out_of_memory) throw std::bad_alloc();
}

// Multiplies with numbers of `kBits` bits.
template <int kBits, class Element>
void linear_groups(const Element* x, const char* weights, const Groups& groups, int64_t n_tokens,
                   int64_t n_in, const Job<Element>& job) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Element, BFloat16>) {
    using Matrix = GroupPanels<BFloat16Dot, BFloat16Values<kBits>, Element>;
    linear(x, Matrix(weights, groups, n_in), n_tokens, n_in, job);
    return;
  }
#endif
  using Matrix = GroupPanels<FloatDot, FloatValues<kBits>, Element>;
  linear(x, Matrix(weights, groups, n_in), n_tokens, n_in, job);
}

// Writes a row of a matrix in groups.
template <class Element>
void write_row(const char* weights, const Groups& groups, int64_t n_in, int64_t row, Element* out) {
  const int64_t n_groups = groups.n_groups(n_in), group_bytes = groups.group_bytes();
  const int64_t per_word = groups.inputs_of_word(), lane = row % kPanel;
  const char* panel = weights + row / kPanel * n_groups * group_bytes;
  const auto number = [&](const char* scales) {
    if (groups.scale_bytes == 2) return to_float(reinterpret_cast<const Float16*>(scales)[lane]);
    return reinterpret_cast<const float*>(scales)[lane];
  };
  for (int64_t group = 0; group < n_groups; ++group) {
    const char* scales = panel + group * group_bytes;
    const float scale = number(scales);
    const float offset = groups.has_offsets ? number(scales + kPanel * groups.scale_bytes) : 0.0f;
    const auto* words = reinterpret_cast<const uint32_t*>(scales + groups.scales_bytes()) + lane;
    const int64_t begin = group * groups.size, end = std::min(n_in, begin + groups.size);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t input = i - begin;
      const uint32_t word = words[input / per_word * kPanel];
      const int within = static_cast<int>(input % per_word);
      const int value = groups.bits == 8 ? static_cast<int8_t>(word >> place_of<8>(within))
                                         : groups.values[word >> place_of<4>(within) & 15];
      store_some(out + i, splat(static_cast<float>(value) * scale + offset), 1);
    }
  }
}

}  // namespace
}  // namespace orcinus

using orcinus::BFloat16;

// Returns the number of outputs of a panel.
ORCINUS_EXPORT(int64_t, linear_panel) { return orcinus::kPanel; }

// Computes out = finish(x @ weight.T + bias + residual) for x [n_tokens, n_in]; all tensors are dense
// and of `element`. Returns kDone or kNoMemory.
ORCINUS_EXPORT(orcinus::Status, linear, int64_t element, const void* x, const void* weights,
               const void* bias, const void* residual, void* out, int64_t n_tokens, int64_t n_in,
               int64_t n_out, int64_t finish) {
  using namespace orcinus;
  const auto* words = static_cast<const uint32_t*>(weights);
  const auto how = static_cast<Finish>(finish);
  return status_of([&] {
    if (element == kFloat32) {
      linear(static_cast<const float*>(x), Panels<FloatDot, float>(words, n_in), n_tokens, n_in,
             Job<float>{static_cast<const float*>(bias), static_cast<const float*>(residual),
                        static_cast<float*>(out), n_out, how});
    } else {
      linear(static_cast<const BFloat16*>(x), Panels<BFloat16Dot, BFloat16>(words, n_in), n_tokens,
             n_in,
             Job<BFloat16>{static_cast<const BFloat16*>(bias),
                           static_cast<const BFloat16*>(residual), static_cast<BFloat16*>(out),
                           n_out, how});
    }
  });
}

// Returns whether int8 weights are multiplied at the processor's rate.
ORCINUS_EXPORT(int64_t, linear_has_int8) {
#if defined(__AVX512VNNI__)
  return true;
#else
  return false;
#endif
}

// Computes `orcinus_linear` with int8 weights and inputs that are quantised on the fly. `starts` and
// `scales` are those of outputs, as `Scales` says, for whole panels; other tensors are of `element`.
ORCINUS_EXPORT(orcinus::Status, linear_int8, int64_t element, const void* x, const void* weights,
               const void* starts, const void* scales, const void* bias, const void* residual,
               void* out, int64_t n_tokens, int64_t n_in, int64_t n_out, int64_t finish) {
#if defined(__AVX512VNNI__)
  using namespace orcinus;
  return status_of([&] {
    with_element(element, [&](auto type) {
      using Element = typename decltype(type)::type;
      const Scales of_outputs{static_cast<const int32_t*>(starts),
                              static_cast<const float*>(scales)};
      linear(static_cast<const Element*>(x),
             Panels<Int8Dot, Element>(static_cast<const uint32_t*>(weights), n_in), n_tokens, n_in,
             Job<Element>{static_cast<const Element*>(bias), static_cast<const Element*>(residual),
                          static_cast<Element*>(out), n_out, static_cast<Finish>(finish),
                          of_outputs});
    });
  });
#else
  return orcinus::kDone;  // never called: `orcinus_linear_has_int8` is false
#endif
}

// Computes `orcinus_linear` with weights in groups, as `groups.h` says.
ORCINUS_EXPORT(orcinus::Status, linear_groups, int64_t element, const void* x, const void* weights,
               const void* groups, const void* bias, const void* residual, void* out,
               int64_t n_tokens, int64_t n_in, int64_t n_out, int64_t finish) {
  using namespace orcinus;
  const auto& form = *static_cast<const Groups*>(groups);
  return status_of([&] {
    with_element(element, [&](auto type) {
      using Element = typename decltype(type)::type;
      const Job<Element> job{static_cast<const Element*>(bias),
                             static_cast<const Element*>(residual), static_cast<Element*>(out),
                             n_out, static_cast<Finish>(finish)};
      const auto* of_x = static_cast<const Element*>(x);
      const auto* of_weights = static_cast<const char*>(weights);
      if (form.rounds_inputs) {
        linear(of_x, RoundedPanels<Element>(of_weights, form, n_in), n_tokens, n_in, job);
      } else if (form.bits == 4) {
        linear_groups<4>(of_x, of_weights, form, n_tokens, n_in, job);
      } else {
        linear_groups<8>(of_x, of_weights, form, n_tokens, n_in, job);
      }
    });
  });
}

// Writes the rows of a matrix in groups that `indices` name, [n, n_in] of `element`.
ORCINUS_EXPORT(void, groups_rows, int64_t element, const void* weights, const void* groups,
               const int64_t* indices, void* out, int64_t n, int64_t n_in) {
  using namespace orcinus;
  const auto& form = *static_cast<const Groups*>(groups);
  with_element(element, [&](auto type) {
    using Element = typename decltype(type)::type;
    for_rows(n, n_in * sizeof(Element), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        write_row(static_cast<const char*>(weights), form, n_in, indices[i],
                  static_cast<Element*>(out) + i * n_in);
      }
    });
  });
}
