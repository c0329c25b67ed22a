// Products of weights of four bits with inputs that are rounded to int8.
//
// Inputs are rounded in blocks of kBlockInputs neighbours of one token. A block has a scale of its own,
// so that what a token becomes does not depend on other tokens. Within a block all products and sums
// are whole numbers, and exact on every processor:
//
//     number     0 to 15, as the weight is stored, which stands for number + first
//     input      -127 to 127, which stands for input * scale
//     sum        of number * input over the block
//     total     += (sum * scale + first * scale * inputs' sum) * scale of the weights
//                 + scale * inputs' sum * offset of the weights
//
// A block has at most eight words of inputs. Where an instruction adds products of two neighbours to
// 16 bits, eight of them are at most 8 * 2 * 15 * 127 = 30480, which fits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "groups.h"
#include "memory.h"
#include "vectors.h"

namespace orcinus {

constexpr int kBlockInputs = 32;
constexpr int kStepInputs = 8;  // of a word of weights
constexpr int kStepParts = 2;   // words of inputs for a word of weights

// How the groups of a matrix are cut into blocks. The last block of a group may be shorter.
struct InputBlocks {
  explicit InputBlocks(const Groups& groups)
      : group_steps(groups.n_steps()),
        of_group((groups.size + kBlockInputs - 1) / kBlockInputs),
        n_factors(groups.has_offsets ? 3 : 2) {}

  // Words of a token's inputs and factors in a group.
  int64_t group_words() const { return group_steps * kStepParts + of_group * n_factors; }

  int64_t group_steps;
  int64_t of_group;
  int64_t n_factors;  // of a block: scale, first * scale * inputs' sum, perhaps scale * inputs' sum
};

// Eight inputs, as they lie beside a word of weights.
using EightFloats = float __attribute__((vector_size(32)));
using EightInts = int32_t __attribute__((vector_size(32)));
using EightWords = uint32_t __attribute__((vector_size(32)));
using EightBytes = int8_t __attribute__((vector_size(8)));

// Writes a block of at most kBlockInputs inputs of one token: words of inputs that are `stride` words
// apart, and behind those of the whole block its factors. Returns what follows the block.
inline uint32_t* round_block(const float* x, int64_t n_steps, int first, bool has_offsets,
                             int64_t stride, uint32_t* out) {
  constexpr float kLargest = 127.0f;
  constexpr float kNothing = 1e-30f;       // a block below this is zero
  constexpr float kToWhole = 12582912.0f;  // 1.5 * 2^23: added, it rounds to a whole number
  EightInts largest = {};                  // magnitudes by their bits, in whose order NaN is above all
  for (int64_t step = 0; step < n_steps; ++step) {
    EightInts bits;
    std::memcpy(&bits, x + step * kStepInputs, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t magnitude_bits = largest[0];
  for (int i = 1; i < kStepInputs; ++i) magnitude_bits = std::max(magnitude_bits, largest[i]);
  float magnitude;
  std::memcpy(&magnitude, &magnitude_bits, sizeof magnitude);
  const float steps = magnitude < kNothing ? 0.0f : kLargest / magnitude;
  EightWords sums = {};  // without a sign, since those of inputs that are not finite wrap
  for (int64_t step = 0; step < n_steps; ++step) {
    EightFloats inputs;
    std::memcpy(&inputs, x + step * kStepInputs, sizeof inputs);
    const EightWords whole = (EightWords)(inputs * steps + kToWhole) - 0x4b400000;
    sums += whole;
    const EightBytes bytes = __builtin_convertvector((EightInts)whole, EightBytes);
    const EightBytes ordered = __builtin_shufflevector(bytes, bytes, 0, 4, 1, 5, 2, 6, 3, 7);
    uint32_t words[kStepParts];
    std::memcpy(words, &ordered, sizeof words);
    for (uint32_t word : words) {
      *out = word;
      out += stride;
    }
  }
  uint32_t sum = 0;
  for (int i = 0; i < kStepInputs; ++i) sum += sums[i];
  // The scale of a block that is not finite is not finite either, and neither are its results.
  const float scale = magnitude / kLargest;
  const float scaled_sum = scale * static_cast<float>(static_cast<int32_t>(sum));
  const float factors[3] = {scale, static_cast<float>(first) * scaled_sum, scaled_sum};
  for (int i = 0; i < (has_offsets ? 3 : 2); ++i) {
    std::memcpy(out, &factors[i], sizeof *out);
    out += stride;
  }
  return out;
}

// Writes the words of a token's inputs, `stride` words apart, for all blocks of all groups.
template <class Element>
void round_token(const Element* x, int64_t n_in, const Groups& groups, int64_t stride, uint32_t* out) {
  const InputBlocks blocks(groups);
  float block[kBlockInputs + kLanes];
  for (int64_t begin = 0; begin < n_in; begin += groups.size) {
    for (int64_t step = 0; step < blocks.group_steps; step += kBlockInputs / kStepInputs) {
      const int64_t n_steps = std::min<int64_t>(kBlockInputs / kStepInputs, blocks.group_steps - step);
      const int64_t at = begin + step * kStepInputs, n = n_steps * kStepInputs;
      const int64_t n_given = std::clamp<int64_t>(n_in - at, 0, n);
      for (int64_t i = 0; i < n_given; i += kLanes) {
        store(block + i, load_up_to(x + at + i, n_given - i));
      }
      std::fill(block + n_given, block + n, 0.0f);
      out = round_block(block, n_steps, groups.values[0], groups.has_offsets, stride, out);
    }
  }
}

// Sums of products in a block.
#if defined(__AVX512VNNI__)
struct BlockSums {
  Ints sums = {};
  void add(Words numbers, uint32_t inputs) {
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)numbers,
                                     _mm512_set1_epi32(static_cast<int>(inputs)));
  }
  Ints whole() const { return sums; }
};
#elif defined(__AVX512BW__)
struct BlockSums {
  __m512i sums = {};
  void add(Words numbers, uint32_t inputs) {
    const __m512i products =
        _mm512_maddubs_epi16((__m512i)numbers, _mm512_set1_epi32(static_cast<int>(inputs)));
    sums = _mm512_add_epi16(sums, products);
  }
  Ints whole() const { return (Ints)_mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
};
#elif defined(__AVX2__)
struct BlockSums {
  __m256i sums = {};
  void add(Words numbers, uint32_t inputs) {
    const __m256i products =
        _mm256_maddubs_epi16((__m256i)numbers, _mm256_set1_epi32(static_cast<int>(inputs)));
    sums = _mm256_add_epi16(sums, products);
  }
  Ints whole() const { return (Ints)_mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
};
#else
struct BlockSums {
  Ints sums = {};
  void add(Words numbers, uint32_t inputs) {
    for (int place = 0; place < 32; place += 8) {
      const auto input = static_cast<int8_t>(inputs >> place);
      sums += (Ints)(numbers >> place & 0xff) * static_cast<int32_t>(input);
    }
  }
  Ints whole() const { return sums; }
};
#endif

// Totals of n tokens and one panel. `soon` are lines of memory that are wanted soon.
template <int n>
void multiply_rounded(const Groups& groups, const char* panel, const uint32_t* inputs,
                      int64_t n_groups, const char* soon, int64_t bytes_per_step, Floats* out) {
  const InputBlocks blocks(groups);
  const int64_t scales_bytes = groups.scales_bytes(), group_bytes = groups.group_bytes();
  const auto factor = [&](int64_t which, int token) {
    float of_block;
    std::memcpy(&of_block, inputs + which * n + token, sizeof of_block);
    return splat(of_block);
  };
  Floats totals[n][2] = {};
  for (int64_t group = 0; group < n_groups; ++group) {
    const char* words = panel + scales_bytes;
    const Floats scales[2] = {load_scales(panel, groups.scale_bytes, 0),
                              load_scales(panel, groups.scale_bytes, 1)};
    __builtin_prefetch(soon, 0, 2);
    soon += bytes_per_step * scales_bytes / (kPanel * 4);
    for (int64_t begin = 0; begin < blocks.group_steps; begin += kBlockInputs / kStepInputs) {
      const int64_t end = std::min<int64_t>(begin + kBlockInputs / kStepInputs, blocks.group_steps);
      BlockSums sums[n][2];
      for (int64_t step = begin; step < end; ++step) {
        __builtin_prefetch(soon, 0, 2);
        __builtin_prefetch(soon + kLineBytes, 0, 2);
        soon += bytes_per_step;
        const Words low = load_words(words), high = load_words(words + kVectorBytes);
        words += kPanel * 4;
#pragma GCC unroll 2
        for (int part = 0; part < kStepParts; ++part) {
          const Words low_numbers = low >> 4 * part & 0x0f0f0f0f;
          const Words high_numbers = high >> 4 * part & 0x0f0f0f0f;
#pragma GCC unroll 16
          for (int i = 0; i < n; ++i) {
            sums[i][0].add(low_numbers, inputs[i]);
            sums[i][1].add(high_numbers, inputs[i]);
          }
          inputs += n;
        }
      }
      for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) {
          const Floats sum = __builtin_convertvector(sums[i][half].whole(), Floats);
          const Floats of_block = fused(sum, factor(0, i), factor(1, i));
          totals[i][half] = fused(of_block, scales[half], totals[i][half]);
        }
        if (!groups.has_offsets) continue;
        const Floats offsets =
            load_scales(panel + kPanel * groups.scale_bytes, groups.scale_bytes, half);
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) totals[i][half] = fused(factor(2, i), offsets, totals[i][half]);
      }
      inputs += blocks.n_factors * n;
    }
    panel += group_bytes;
  }
  std::memcpy(out, totals, sizeof totals);
}

}  // namespace orcinus
