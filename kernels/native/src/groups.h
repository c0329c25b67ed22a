// Matrices of small whole numbers with a scale for each group of inputs, as they lie in panels.
//
// A weight is `value * scale + offset`. Eight bits are the value itself, with its sign; four bits name
// one of sixteen values. In a panel the groups of its outputs follow each other. A group is
//
//     scales   [kPanel], float16 or float32
//     offsets  [kPanel], of the same type, if there are any
//     words    [n_steps][kPanel], of the numbers of 4 or 8 inputs each
//
// so that a panel is read from its begin to its end. A word of eight bits has its inputs in their
// order. A word of four has the even inputs in its lower half and the odd ones in its upper half: a
// shift brings two neighbours to the lowest bits of both halves.

#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"
#include "vectors.h"

namespace orcinus {

constexpr int kPanel = 2 * kLanes;  // outputs of a panel: two vectors

// The form of such a matrix; `structs.py` has it, too.
struct Groups {
  int64_t bits;         // of a number, 4 or 8
  int64_t size;         // inputs of a group, a multiple of those of a word
  int64_t scale_bytes;  // 2: float16, 4: float32
  int64_t has_offsets;
  int64_t rounds_inputs;  // to int8; only with four bits whose values follow each other
  int8_t values[16];      // what numbers of four bits mean
  ORCINUS_FIELDS(Groups, bits, size, scale_bytes, has_offsets, rounds_inputs, values)

  int64_t inputs_of_word() const { return 32 / bits; }
  int64_t n_steps() const { return size / inputs_of_word(); }
  int64_t n_groups(int64_t n_in) const { return (n_in + size - 1) / size; }
  int64_t scales_bytes() const { return kPanel * scale_bytes * (has_offsets ? 2 : 1); }
  int64_t group_bytes() const { return scales_bytes() + n_steps() * kPanel * 4; }
};

// float16 as it is stored.
struct Float16 {
  uint16_t bits;
};

// What is no number does not occur: such scales are stored as float32.
inline Floats load(const Float16* from) {
  HalfWords halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  const Words bits = widen(halves);
  // The exponent begins at -15 there, and at -127 here.
  const Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Floats)((Words)magnitude | (bits & 0x8000) << 16);
#endif
}

inline float to_float(Float16 x) {
  Float16 row[kLanes] = {x};
  return load(row)[0];
}

// The scales or offsets of a vector of outputs.
inline Floats load_scales(const char* from, int64_t scale_bytes, int half) {
  if (scale_bytes == 2) return load(reinterpret_cast<const Float16*>(from) + half * kLanes);
  return load(reinterpret_cast<const float*>(from) + half * kLanes);
}

// Where the number of an input lies in its word, in bits.
template <int kBits>
constexpr int place_of(int input) {
  return kBits == 8 ? 8 * input : input % 2 * 16 + input / 2 * 4;
}

// The bytes at `place` of each word as numbers with a sign.
inline Floats from_bytes(Words words, int place) {
  return __builtin_convertvector((Ints)(words << (24 - place)) >> 24, Floats);
}

// The values of numbers as floats, one for each word: of the first input, the second, and so on.
template <int kBits>
struct FloatValues {
  static constexpr int kParts = 32 / kBits;
  static constexpr int kInputs = 1;  // of a part
  using Unpacked = Words;
  explicit FloatValues(const Groups&) {}
  Unpacked unpack(Words words) const { return words; }
  Words part(const Unpacked& words, int i) const { return (Words)from_bytes(words, 8 * i); }
};

#if defined(__AVX512F__)
// The instruction looks up sixteen values by the lowest four bits of each word.
template <>
struct FloatValues<4> {
  static constexpr int kParts = 8;
  static constexpr int kInputs = 1;
  using Unpacked = Words;
  explicit FloatValues(const Groups& groups) {
    for (int i = 0; i < kLanes; ++i) values[i] = groups.values[i];
  }
  Unpacked unpack(Words words) const { return words; }
  Words part(const Unpacked& words, int i) const {
    return (Words)_mm512_permutexvar_ps((__m512i)(words >> place_of<4>(i)), (__m512)values);
  }
  Floats values;
};
#else
// Words of bytes that are looked up by the four bits of each, below 16.
inline Words look_up(const int8_t (&values)[16], Words numbers) {
#if defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  return (Words)_mm256_shuffle_epi8(table, (__m256i)numbers);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_s8(vld1q_s8(values), (uint8x16_t)numbers);
#else
  uint8_t bytes[kVectorBytes];
  std::memcpy(bytes, &numbers, sizeof bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(values[byte]);
  return load_words(bytes);
#endif
}

// A word becomes two of bytes.
template <>
struct FloatValues<4> {
  static constexpr int kParts = 8;
  static constexpr int kInputs = 1;
  struct Unpacked {
    Words bytes[2];
  };
  explicit FloatValues(const Groups& groups) {
    std::memcpy(values, groups.values, sizeof values);
  }
  Unpacked unpack(Words words) const {
    return {{look_up(values, words & 0x0f0f0f0f), look_up(values, words >> 4 & 0x0f0f0f0f)}};
  }
  Words part(const Unpacked& unpacked, int i) const {
    const int place = place_of<4>(i);
    return (Words)from_bytes(unpacked.bytes[place / 4 % 2], place / 8 * 8);
  }
  int8_t values[16];
};
#endif

#if defined(__AVX512BF16__)
// The values of numbers as bfloat16, two neighbours for each word.
template <int kBits>
struct BFloat16Values;

template <>
struct BFloat16Values<4> {
  static constexpr int kParts = 4;
  static constexpr int kInputs = 2;
  using Unpacked = Words;
  explicit BFloat16Values(const Groups& groups) {
    // The instruction looks at a fifth bit, which may be anything.
    for (int i = 0; i < 2 * kLanes; ++i) {
      const float value = groups.values[i % 16];
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      values[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  Unpacked unpack(Words words) const { return words; }
  Words part(const Unpacked& words, int i) const {
    return (Words)_mm512_permutexvar_epi16((__m512i)(words >> 4 * i), (__m512i)values);
  }
  uint16_t __attribute__((vector_size(kVectorBytes))) values;
};

template <>
struct BFloat16Values<8> {
  static constexpr int kParts = 2;
  static constexpr int kInputs = 2;
  using Unpacked = Words;
  explicit BFloat16Values(const Groups&) {}
  Unpacked unpack(Words words) const { return words; }
  Words part(const Unpacked& words, int i) const {
    // Of eight bits the lower half of a float32 is zero.
    return (Words)from_bytes(words, 16 * i) >> 16 | (Words)from_bytes(words, 16 * i + 8);
  }
};
#endif

}  // namespace orcinus
