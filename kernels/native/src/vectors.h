// Vectors of as many 32-bit lanes as the target has, and what the operations do with them.
//
// Everything is written with the compiler's vector extension (GCC, Clang), so one source serves all
// instruction sets; intrinsics stand only where the compiler does not find the instruction itself.
//
// The compiler fuses no product with a sum (`-ffp-contract=off`): it might do so in one instance of a
// template and not in another, whose results must be the same to the bit. `fused` does where it is
// worth it.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace orcinus {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

constexpr int kLanes = kVectorBytes / 4;

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Ints = int32_t __attribute__((vector_size(kVectorBytes)));
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
using HalfWords = uint16_t __attribute__((vector_size(kVectorBytes / 2)));

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }

inline Floats select(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, rounded once where the target can.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Ints lane_indices() {
  Ints indices;
  for (int lane = 0; lane < kLanes; ++lane) indices[lane] = lane;
  return indices;
}

// --- Memory ---------------------------------------------------------------------------------------

inline Words load_words(const void* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

inline void store_words(void* to, Words words) { std::memcpy(to, &words, sizeof words); }

inline Words widen(HalfWords halves) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// Rounds to nearest, ties to even; a NaN stays one.
inline HalfWords narrow(Floats x) {
#if defined(__AVX512BF16__)
  return (HalfWords)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words kept = (Ints)(x == x) ? rounded : (bits >> 16) | 0x40;
  return __builtin_convertvector(kept, HalfWords);
#endif
}

inline HalfWords load_half_words(const BFloat16* from) {
  HalfWords halves;
  std::memcpy(&halves, from, sizeof halves);
  return halves;
}

inline Floats load(const float* from) { return (Floats)load_words(from); }
inline Floats load(const BFloat16* from) { return (Floats)(widen(load_half_words(from)) << 16); }

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(BFloat16* to, Floats x) {
  const HalfWords halves = narrow(x);
  std::memcpy(to, &halves, sizeof halves);
}

// The first `n` < kLanes elements, and zeros.
template <class T>
inline Floats load_some(const T* from, int n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, n * sizeof(T));
  return load(buffer);
}

template <class T>
inline void store_some(T* to, Floats x, int n) {
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(to, buffer, n * sizeof(T));
}

template <class T>
inline Floats load_up_to(const T* from, int64_t n) {
  return n >= kLanes ? load(from) : load_some(from, static_cast<int>(n));
}

template <class T>
inline void store_up_to(T* to, Floats x, int64_t n) {
  if (n >= kLanes) {
    store(to, x);
  } else {
    store_some(to, x, static_cast<int>(n));
  }
}

// --- Across lanes ---------------------------------------------------------------------------------

inline float sum_of_lanes(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
#endif
}

inline float largest_of_lanes(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float largest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = x[lane] > largest ? x[lane] : largest;
  return largest;
#endif
}

// One step of a transposition: of every square of 2 * kStep lanes in `first` and `second`, rows that
// are kStep apart, the two quarters off the diagonal change places.
template <int kStep, int... kLane>
inline void swap_quarters(Words& first, Words& second, std::integer_sequence<int, kLane...>) {
  const Words a = first, b = second;
  first = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane - kStep : kLane)...);
  second = __builtin_shufflevector(a, b, (kLane & kStep ? kLanes + kLane : kLane + kStep)...);
}

template <int kStep = kLanes / 2>
inline void transpose(Words (&rows)[kLanes]) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (!(i & kStep)) {
        swap_quarters<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, kLanes>());
      }
    }
    transpose<kStep / 2>(rows);
  }
}

// --- Functions ------------------------------------------------------------------------------------

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 127, to 2 units in the last place; below 2^-126 it is 0.
inline Floats exp2(Floats x) {
  // Adding and taking away 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
  const Floats shifted = x + 12582912.0f;
  const Floats f = x - (shifted - 12582912.0f);  // [-0.5, 0.5]
  // Taylor's series of 2^f; the first term left out is below 2e-7.
  Floats p = fused(f, splat(1.540353039e-4f), splat(1.333355815e-3f));
  p = fused(p, f, splat(9.618129108e-3f));
  p = fused(p, f, splat(5.550410866e-2f));
  p = fused(p, f, splat(2.402265070e-1f));
  p = fused(p, f, splat(6.931471806e-1f));
  p = fused(p, f, splat(1.0f));
  // Of numbers without a sign, whose sums wrap: of an `x` that is too small it is thrown away.
  const Floats power = (Floats)((Words)p + ((Words)shifted << 23));
  return x < -126.0f ? Floats{} : power;
}

// 1 / (1 + e^-x).
inline Floats sigmoid(Floats x) {
  const Floats exponent = x * -kLog2E;
  return 1.0f / (1.0f + exp2(exponent > 126.0f ? splat(126.0f) : exponent));
}

// 1 - 2 / (1 + e^2x); the error is absolute, a few 1e-8.
inline Floats tanh(Floats x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

}  // namespace orcinus
