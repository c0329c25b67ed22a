// Attention of a whole mixed batch over paged keys and values, in one call per layer.
//
// The batch is cut into pieces of work: some consecutive queries of one span, for one or all K/V
// heads, over all or a part of the keys that they see. Threads take pieces from both ends of one list,
// which is ordered by size, and finish together; there is no barrier but the end.
//
// A piece walks over its keys a tile of 64 at a time. All queries of the piece, those of the heads that
// share the K/V head side by side, go over the tile six rows at a time: scores, online softmax (Milakov
// & Gimelshein, 2018), weighted values. Keys are transposed before, so that a lane has the score of a
// key. Where there are many rows, values are put into the form that the processor's multiply-add wants;
// where there are few, which is where a request decodes, each block of rows does so as it reads them.
//
// A query's result does not depend on the batch, the threads or the piece: its sums follow positions.
// Tiles begin at multiples of 64 in the sequence. A segment is 256 keys, from a multiple of 256; its
// softmax begins anew, and the results of segments are folded in their order, whether one thread
// computes them or several. A key that a query does not see adds an exact zero. Every sum goes over the
// head's elements, or over keys, in their order, with the same roundings for any number of rows.
//
// A head's sink is a score without a key. It joins the sum of a row's weights once, when all of its keys
// are folded.
//
// For g query heads per K/V head of d elements, a piece of q queries does 4 * g * q * d floating point
// operations for every key, and packs 2 * d elements: packing costs less than a tenth from about 30
// rows on. A decode reads 2 * d elements for 4 * g * d operations, which the memory cannot keep up
// with; it fetches the next tile while it computes one.
//
// Values may be the first elements of keys, as in latent attention. They are read as any others, from
// where the keys have just been.
//
// Products of bfloat16 are summed in float32, two at a time where the processor can (AVX512_BF16), and
// from float32 copies where it cannot.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include <omp.h>

#include "element.h"
#include "memory.h"
#include "operations.h"
#include "vectors.h"

namespace orcinus {
namespace {

constexpr int kTileKeys = 64;
constexpr int kTileVectors = kTileKeys / kLanes;
constexpr int kBlockRows = 6;  // of a block whose sums stay in registers
constexpr int kBlockVectors = kRegisters == 32 ? 4 : 2;
constexpr int kStoredRows = 2 * kBlockRows;  // for which packing values does not pay
constexpr int kPieceRows = 96;      // that share one packed tile
constexpr int kFewestRows = 24;     // if there is too little work to give every thread that many
constexpr int kPiecesPerThread = 4;  // as many at least, so that they finish together
constexpr int64_t kSegmentKeys = 256;  // whose softmax is computed by itself
static_assert(kSegmentKeys % kTileKeys == 0);
constexpr float kLowest = -1e30f;

// Operands of the matrix products as float32: one in each 32-bit word.
struct Float32Words {
  static constexpr int kDepth = 1;  // elements in a word

  static Floats multiply_add(Floats sum, const uint32_t* left, Words right) {
    float x;
    std::memcpy(&x, left, sizeof x);
    return fused(splat(x), (Floats)right, sum);
  }

  template <class T>
  static Words load_row(const T* from, int n) {
    return (Words)load_up_to(from, n);
  }

  static void store_weights(uint32_t* to, int at, Floats weights) {
    store(reinterpret_cast<float*>(to) + at, weights);
  }

  // Words with the values of `kDepth` keys each, of the first `n` elements.
  template <class T, class N>
  [[gnu::always_inline]] static void pack_values(const T* const* rows, N n, uint32_t* to) {
    for (int at = 0; at < n; at += kLanes) {
      store_words(to + at, (Words)load_up_to(rows[0] + at, n - at));
    }
  }

  // Puts a row of sums into the order of the elements again.
  static void restore_order(float*, int) {}
};

#if defined(__AVX512BF16__)
// Operands of the matrix products as bfloat16: two in each 32-bit word.
struct BFloat16Words {
  static constexpr int kDepth = 2;

  static Floats multiply_add(Floats sum, const uint32_t* left, Words right) {
    uint32_t x;
    std::memcpy(&x, left, sizeof x);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)right);
  }

  static Words load_row(const BFloat16* from, int n) {
    if (n >= 2 * kLanes) return load_words(from);
    return (Words)_mm512_maskz_loadu_epi16((1u << std::max(n, 0)) - 1, from);
  }

  static void store_weights(uint32_t* to, int at, Floats weights) {
    store(reinterpret_cast<BFloat16*>(to) + at, weights);
  }

  // Interleaving two rows leaves the elements of every two vectors in another order, four by four.
  template <class N>
  [[gnu::always_inline]] static void pack_values(const BFloat16* const* rows, N n, uint32_t* to) {
    int at = 0;
    for (; at + 2 * kLanes <= n; at += 2 * kLanes) {
      const __m512i first = (__m512i)load_words(rows[0] + at);
      const __m512i second = (__m512i)load_words(rows[1] + at);
      store_words(to + at, (Words)_mm512_unpacklo_epi16(first, second));
      store_words(to + at + kLanes, (Words)_mm512_unpackhi_epi16(first, second));
    }
    for (; at < n; at += kLanes) {
      const __mmask16 some = (1u << std::min(kLanes, n - at)) - 1;
      const auto first = (HalfWords)_mm256_maskz_loadu_epi16(some, rows[0] + at);
      const auto second = (HalfWords)_mm256_maskz_loadu_epi16(some, rows[1] + at);
      store_words(to + at, widen(first) | (widen(second) << 16));
    }
  }

  static void restore_order(float* sums, int n) {
    for (int at = 0; at + 2 * kLanes <= n; at += 2 * kLanes) {
      const __m512 low = (__m512)load(sums + at), high = (__m512)load(sums + at + kLanes);
      const __m512i from = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      const __m512i second = _mm512_add_epi32(from, _mm512_set1_epi32(8));
      store(sums + at, (Floats)_mm512_permutex2var_ps(low, from, high));
      store(sums + at + kLanes, (Floats)_mm512_permutex2var_ps(low, second, high));
    }
  }
};
#endif

#if defined(__AVX512BF16__)
template <class T>
using Product = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16Words, Float32Words>;
#else
template <class T>
using Product = Float32Words;
#endif

// The batch and one layer's storage, as `orcinus_attention` gets them.
template <class T>
struct Batch {
  const T* queries;
  int64_t query_stride;  // elements from one token to the next
  const T* keys;         // [n_blocks, block_size, n_kv_heads, head_dim]
  const T* values;       // as far apart as keys, of which they may be the first elements
  T* out;  // [n_tokens, n_heads, value_dim]
  const int64_t* starts;
  const int64_t* n_tokens;
  const int64_t* blocks;  // [n_spans, n_columns]
  int64_t n_spans;
  int64_t n_columns;
  int64_t n_kv_heads;
  int64_t group_size;  // query heads of a K/V head
  int64_t head_dim;
  int64_t value_dim;
  int64_t block_size;
  int64_t window;  // 0: none
  float scale;
  float soft_cap;  // 0: none
  const float* sinks;  // [n_heads], scores without keys; null: none
  bool is_causal;      // false: a query sees all tokens of its span

  // What scores are multiplied by before 2 is raised to them.
  float exponent() const { return soft_cap > 0 ? kLog2E : scale * kLog2E; }
};

// The number of the segment that a key belongs to.
constexpr int64_t segment_of(int64_t key) { return key / kSegmentKeys; }

// Some queries of a span, some K/V heads, and some of the keys that these queries see. The first key is
// that of a tile.
struct Piece {
  int64_t span;
  int64_t first_token;  // in the batch
  int64_t first_position;  // where the first query sees from; the next one sees a key more
  int64_t n_queries;
  int64_t first_kv_head;
  int64_t n_kv_heads;
  int64_t first_key;
  int64_t end_key;
  int64_t cost;
  int64_t n_parts = 1;  // that the keys of these queries are divided into; each part is a piece
  int64_t first_segment = 0;  // of all parts, as the next two
  int64_t n_segments = 0;
  int64_t first_result = -1;  // the place of the first segment's results; -1: there is one part
};

// Results of rows over some of their keys, not yet divided by the sums of their weights.
struct Results {
  float* sums;     // [rows, padded_dim], weighted values
  float* weights;  // [rows, kLanes], sums of weights
  float* largest;  // [rows], the largest score so far

  static int64_t floats(int64_t n_rows, int64_t padded_dim) {
    return n_rows * (padded_dim + kLanes + 1);
  }

  static Results at(float* memory, int64_t n_rows, int64_t padded_dim) {
    float* weights = memory + n_rows * padded_dim;
    return {memory, weights, weights + n_rows * kLanes};
  }

  // Those of no keys.
  void clear(int64_t n_rows, int64_t padded_dim) const {
    std::fill_n(sums, n_rows * padded_dim, 0.0f);
    std::fill_n(weights, n_rows * kLanes, 0.0f);
    std::fill_n(largest, n_rows, kLowest);
  }
};

// Memory of one thread, kept between calls.
class Scratch {
 public:
  // Room for `n` objects, until the next `reset`.
  template <class U>
  U* take(int64_t n) {
    const int64_t bytes = (n * static_cast<int64_t>(sizeof(U)) + 63) / 64 * 64;
    U* taken = reinterpret_cast<U*>(memory_.get() + used_);
    used_ += bytes;
    return taken;
  }

  // Makes room for `bytes` in all; throws std::bad_alloc.
  void reset(int64_t bytes) {
    used_ = 0;
    memory_.of(bytes);
  }

 private:
  Memory memory_;
  int64_t used_ = 0;
};

// Calls `f` with the constant `n`, which is between 1 and kMost.
template <int kMost, class F>
inline void with_constant(int n, const F& f) {
  if constexpr (kMost == 1) {
    f(std::integral_constant<int, 1>{});
  } else if (n == kMost) {
    f(std::integral_constant<int, kMost>{});
  } else {
    with_constant<kMost - 1>(n, f);
  }
}

// sums[r][v] += left[r][s] * right[s][v] over all steps s: 2 * kDepth * kRows * kVectors * kLanes
// operations a step, for one load of `right` per vector and of `left` per row.
template <class Product, int kRows, int kVectors>
inline void multiply(Floats (&sums)[kRows][kVectors], const uint32_t* left, int left_stride,
                     const uint32_t* right, int right_stride, int n_steps) {
  for (int step = 0; step < n_steps; ++step) {
    Words vectors[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) vectors[v] = load_words(right + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Product::multiply_add(sums[r][v], left + r * left_stride, vectors[v]);
      }
    }
    left += 1;
    right += right_stride;
  }
}

// One piece at a time, by one thread.
template <class T, class Product>
class Worker {
 public:
  explicit Worker(const Batch<T>& batch)
      : batch_(batch),
        head_dim_(static_cast<int>(batch.head_dim)),
        head_words_((head_dim_ + Product::kDepth - 1) / Product::kDepth),
        value_dim_(static_cast<int>(batch.value_dim)),
        padded_dim_(round_up(value_dim_, kLanes)) {}

  static constexpr int kFetched = kLineBytes / sizeof(T);
  static constexpr int kStoredElements = kBlockVectors * kLanes;

  // Floats of the results of one segment of a piece.
  int64_t result_floats(const Piece& piece) const {
    return Results::floats(n_rows(piece) * piece.n_kv_heads, padded_dim_);
  }

  // Attends; the result goes to `out`, or those of segments to `results` if the keys are divided.
  // `claim` says which piece this thread does afterwards; it is asked as late as possible, and its
  // first keys are fetched.
  template <class Claim>
  void run(const Piece& piece, float* results, const Claim& claim) {
    prepare(piece);
    for (int64_t key = piece.first_key; key < piece.end_key; key += kTileKeys) {
      offsets_.swap(next_offsets_);
      if (key + kTileKeys < piece.end_key) {
        find_rows(piece, key + kTileKeys);
      } else if (const Piece* next = claim()) {
        find_rows(*next, next->first_key);
      }
      spread(piece, key);
      for (int64_t i = 0; i < piece.n_kv_heads; ++i) attend_tile(piece, key, i);
      const bool is_last = key + kTileKeys >= piece.end_key;
      if (!is_last && segment_of(key + kTileKeys) == segment_of(key)) continue;
      if (results != nullptr) {
        std::copy_n(results_.sums, result_floats(piece), results);
        results += result_floats(piece);
      } else if (segment_of(key) == segment_of(piece.first_key)) {
        std::swap(results_, total_);
      } else {
        fold(total_, results_, n_rows(piece) * piece.n_kv_heads);
      }
      if (!is_last) results_.clear(n_rows(piece) * piece.n_kv_heads, padded_dim_);
    }
    if (results == nullptr) finish(piece, total_);
  }

  // Folds the results of all segments of a piece, which lie one after the other, in their order.
  void combine(const Piece& piece, float* results) {
    const int64_t rows = n_rows(piece) * piece.n_kv_heads;
    const Results total = Results::at(results, rows, padded_dim_);
    for (int64_t i = 1; i < piece.n_segments; ++i) {
      fold(total, Results::at(results + i * result_floats(piece), rows, padded_dim_), rows);
    }
    finish(piece, total);
  }

  // Before the first piece.
  void begin(const Piece& piece) { find_rows(piece, piece.first_key); }

 private:
  int64_t n_rows(const Piece& piece) const { return piece.n_queries * batch_.group_size; }

  void prepare(const Piece& piece) {
    const int64_t rows = n_rows(piece), all_rows = rows * piece.n_kv_heads;
    const int64_t results = Results::floats(all_rows, padded_dim_);
    scratch_.reset(4 * (all_rows * head_words_ + 2 * results) + 8 * rows +
                   4 * kTileKeys * (head_words_ + padded_dim_) + 4 * 2 * kBlockRows * kTileKeys +
                   16 * 64);
    queries_ = scratch_.take<uint32_t>(all_rows * head_words_);
    results_ = Results::at(scratch_.take<float>(results), all_rows, padded_dim_);
    total_ = Results::at(scratch_.take<float>(results), all_rows, padded_dim_);
    positions_ = scratch_.take<int64_t>(rows);
    packed_keys_ = scratch_.take<uint32_t>(head_words_ * kTileKeys);
    packed_values_ = scratch_.take<uint32_t>(padded_dim_ * kTileKeys);
    scores_ = scratch_.take<float>(kBlockRows * kTileKeys);
    probabilities_ = scratch_.take<uint32_t>(kBlockRows * kTileKeys);

    results_.clear(all_rows, padded_dim_);
    int64_t* position = positions_;
    for (int64_t i = 0; i < piece.n_queries; ++i) {
      position = std::fill_n(position, batch_.group_size, piece.first_position + i);
    }
    uint32_t* to = queries_;
    for_each_row(piece, [&](int64_t token, int64_t head) {
      const T* from = batch_.queries + token * batch_.query_stride + head * head_dim_;
      for (int word = 0; word < head_words_; word += kLanes) {
        const int at = word * Product::kDepth;
        const Words words = Product::load_row(from + at, head_dim_ - at);
        if (word + kLanes <= head_words_) {
          store_words(to + word, words);
        } else {
          std::memcpy(to + word, &words, 4 * (head_words_ - word));
        }
      }
      to += head_words_;
    });
  }

  // Calls `f` with the token and the head of every row of a piece, in the order in which scratch memory
  // has them.
  template <class F>
  void for_each_row(const Piece& piece, F&& f) const {
    for (int64_t i = 0; i < piece.n_kv_heads; ++i) {
      const int64_t head = (piece.first_kv_head + i) * batch_.group_size;
      for (int64_t token = piece.first_token; token < piece.first_token + piece.n_queries; ++token) {
        for (int64_t j = 0; j < batch_.group_size; ++j) f(token, head + j);
      }
    }
  }

  T* out(int64_t token, int64_t head) const {
    return batch_.out + (token * batch_.n_kv_heads * batch_.group_size + head) * batch_.value_dim;
  }

  // Finds the offsets of the next tile's keys in storage, from `key` on. A key before the window gets the
  // offset of the first key in it, because its own block may already belong to another request and hold
  // numbers that are not finite. A key behind the last one gets the last one's offset; it is not used.
  void find_rows(const Piece& piece, int64_t key) {
    const int64_t n = std::min<int64_t>(piece.end_key - key, kTileKeys);
    const int64_t row_size = batch_.n_kv_heads * batch_.head_dim;
    const int64_t* blocks = batch_.blocks + piece.span * batch_.n_columns;
    int64_t column = key / batch_.block_size, within = key % batch_.block_size;
    for (int64_t i = 0; i < n; ++i) {
      next_offsets_[i] = (blocks[column] * batch_.block_size + within) * row_size;
      if (++within == batch_.block_size) {
        within = 0;
        ++column;
      }
    }
    const int64_t n_unseen = batch_.window ? piece.first_position + 1 - batch_.window - key : 0;
    if (n_unseen > 0) std::fill_n(next_offsets_.begin(), n_unseen, next_offsets_[n_unseen]);
    std::fill(next_offsets_.begin() + n, next_offsets_.end(), next_offsets_[n - 1]);
    const int64_t head = piece.first_kv_head * batch_.head_dim;
    const int n_lines = static_cast<int>((piece.n_kv_heads * head_dim_ + kFetched - 1) / kFetched);
    keys_ahead_ = {batch_.keys + head, static_cast<int>(n), n_lines};
    const bool are_in_keys = batch_.values == batch_.keys;
    values_ahead_ = {batch_.values + head, are_in_keys ? 0 : static_cast<int>(n), n_lines};
  }

  // Divides the lines of the next tile among the vectors of keys of the tile from `key` on.
  void spread(const Piece& piece, int64_t key) {
    const int64_t n_keys = std::min<int64_t>(kTileKeys, piece.end_key - key);
    const int64_t n_vectors = piece.n_kv_heads * ((n_keys + kLanes - 1) / kLanes);
    n_fetched_ = static_cast<int>(
        (keys_ahead_.n_keys * keys_ahead_.n_lines + n_vectors - 1) / n_vectors);
  }

  // Keys as [head_words, kTileKeys]: as many of them as a vector has lanes at a time.
  void pack_keys(const T* keys, int n_keys) {
    const int head_words = head_words_, head_dim = head_dim_;
    uint32_t* const packed = packed_keys_;
    for (int key = 0; key < n_keys; key += kLanes) {
      const int64_t* offsets = offsets_.data() + key;
      for (int word = 0; word < head_words; word += kLanes) {
        const int at = word * Product::kDepth, n_words = std::min(kLanes, head_words - word);
        Words rows[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = Product::load_row(keys + offsets[i] + at, head_dim - at);
        }
        fetch(keys_ahead_);
        transpose(rows);
        uint32_t* to = packed + word * kTileKeys + key;
        if (n_words == kLanes) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store_words(to + i * kTileKeys, rows[i]);
        } else {
          for (int i = 0; i < n_words; ++i) store_words(to + i * kTileKeys, rows[i]);
        }
      }
    }
  }

  // Values as [n_keys / kDepth, padded_dim], each word with those of kDepth keys.
  void pack_values(const T* values, int n_keys) {
    const int padded_dim = padded_dim_, value_dim = value_dim_;
    uint32_t* to = packed_values_;
    for (int key = 0; key < n_keys; key += kLanes) {
      for (int i = 0; i < kLanes; i += Product::kDepth) {
        const T* rows[Product::kDepth];
        for (int j = 0; j < Product::kDepth; ++j) rows[j] = values + offsets_[key + i + j];
        Product::pack_values(rows, value_dim, to);
        to += padded_dim;
      }
      for (int at = 0; at < value_dim; at += kFetched) fetch(values_ahead_);
    }
  }

  // What is left to be fetched of the next tile: the rows of its keys, one after the other.
  struct Ahead {
    const T* rows = nullptr;
    int n_keys = 0;
    int n_lines = 0;  // of a row
    int key = 0;
    int line = 0;
  };

  // Asks for some lines in the order in which they lie, which the processor's own prefetcher follows. All
  // of a tile at once would be more than can be on the way.
  void fetch(Ahead& ahead, int n_lines = kLanes) const {
    for (int i = 0; i < n_lines && ahead.key < ahead.n_keys; ++i) {
      __builtin_prefetch(ahead.rows + next_offsets_[ahead.key] + ahead.line * kFetched, 0, 2);
      if (++ahead.line == ahead.n_lines) {
        ahead.line = 0;
        ++ahead.key;
      }
    }
  }

  // All rows of K/V head `i` of the piece over the tile of keys from `key` on.
  void attend_tile(const Piece& piece, int64_t key, int64_t i) {
    const int n_keys = static_cast<int>(std::min<int64_t>(kTileKeys, piece.end_key - key));
    const int64_t head = (piece.first_kv_head + i) * batch_.head_dim;
    const T *keys = batch_.keys + head, *values = batch_.values + head;
    const int rows = static_cast<int>(n_rows(piece));
    const bool are_values_packed = rows > kStoredRows || value_dim_ % kStoredElements != 0;
    pack_keys(keys, n_keys);
    if (are_values_packed) pack_values(values, n_keys);
    for (int row = 0; row < rows; row += kBlockRows) {
      const int n = std::min(kBlockRows, rows - row);
      // The last of these rows sees the most keys at the end, the first at the beginning.
      const int64_t end = std::min<int64_t>(n_keys, positions_[row + n - 1] + 1 - key);
      const bool is_before = batch_.window && positions_[row] - batch_.window >= key + n_keys - 1;
      if (end <= 0 || is_before) continue;
      const int n_vectors = static_cast<int>((end + kLanes - 1) / kLanes);
      const int64_t first = i * rows + row;
      with_constant<kBlockRows>(n, [&](auto n_block_rows) {
        attend<n_block_rows>(are_values_packed ? nullptr : values, first, positions_ + row, key,
                             n_keys, n_vectors);
      });
    }
  }

  // Rows that begin at row `first` of all heads over the first `n_vectors` vectors of a tile. Its values
  // are packed, or stored as `values`.
  template <int kRows>
  [[gnu::noinline]] void attend(const T* values, int64_t first, const int64_t* positions,
                                int64_t key, int n_keys, int n_vectors) {
    float decay[round_up(kBlockRows, kLanes)] = {};
    score<kRows>(first, n_vectors);
    weigh<kRows>(first, positions, key, n_keys, n_vectors, decay);
    if (values == nullptr) {
      add_packed<kRows>(first, n_vectors, decay);
    } else {
      add_stored<kRows>(values, first, n_vectors, decay);
    }
  }

  // Scores of rows that begin at row `first` of all heads, of the first `n_vectors` vectors of keys.
  template <int kRows>
  void score(int64_t first, int n_vectors) {
    const uint32_t* queries = queries_ + first * head_words_;
    for (int vector = 0; vector < n_vectors; vector += kBlockVectors) {
      with_constant<kBlockVectors>(std::min(kBlockVectors, n_vectors - vector), [&](auto n_constant) {
        constexpr int n = n_constant;
        Floats sums[kRows][n] = {};
        multiply<Product>(sums, queries, head_words_, packed_keys_ + vector * kLanes, kTileKeys,
                          head_words_);
        for (int r = 0; r < kRows; ++r) {
          for (int v = 0; v < n; ++v) {
            store(scores_ + r * kTileKeys + (vector + v) * kLanes, sums[r][v]);
          }
        }
      });
    }
  }

  // Adds the values of the first `n_vectors` vectors of keys to the rows' sums, which decay before.
  template <int kRows>
  void add_packed(int64_t first, int n_vectors, const float* decay) {
    float* results = results_.sums + first * padded_dim_;
    for (int at = 0; at < padded_dim_; at += kBlockVectors * kLanes) {
      const int n_left = (padded_dim_ - at) / kLanes;
      with_constant<kBlockVectors>(std::min(kBlockVectors, n_left), [&](auto n_constant) {
        constexpr int n = n_constant;
        Floats sums[kRows][n];
        load_decayed(sums, results + at, decay);
        multiply<Product>(sums, probabilities_, kTileKeys / Product::kDepth, packed_values_ + at,
                          padded_dim_, n_vectors * kLanes / Product::kDepth);
        store_sums(sums, results + at);
      });
    }
  }

  // The same from values as they are stored.
  template <int kRows>
  void add_stored(const T* values, int64_t first, int n_vectors, const float* decay) {
    constexpr int n = kStoredElements / kLanes;
    const int n_fetched = (n_fetched_ * kStoredElements + padded_dim_ - 1) / padded_dim_;
    float* results = results_.sums + first * padded_dim_;
    for (int at = 0; at < padded_dim_; at += kStoredElements) {
      Floats sums[kRows][n];
      load_decayed(sums, results + at, decay);
      for (int key = 0; key < n_vectors * kLanes; key += kLanes) {
#pragma GCC unroll 2
        for (int i = key; i < key + kLanes; i += Product::kDepth) {
          const T* rows[Product::kDepth];
          for (int j = 0; j < Product::kDepth; ++j) rows[j] = values + offsets_[i + j] + at;
          uint32_t words[n * kLanes];
          Product::pack_values(rows, std::integral_constant<int, kStoredElements>{}, words);
          multiply<Product>(sums, probabilities_ + i / Product::kDepth, kTileKeys / Product::kDepth,
                            words, 0, 1);
        }
        fetch(values_ahead_, n_fetched);
      }
      store_sums(sums, results + at);
    }
  }

  template <int kRows, int n>
  void load_decayed(Floats (&sums)[kRows][n], const float* from, const float* decay) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < n; ++v) {
        sums[r][v] = decay[r] * load(from + r * padded_dim_ + v * kLanes);
      }
    }
  }

  template <int kRows, int n>
  void store_sums(const Floats (&sums)[kRows][n], float* to) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < n; ++v) store(to + r * padded_dim_ + v * kLanes, sums[r][v]);
    }
  }

  // Turns the scores into weights. Each step goes over all rows before the next, because within a row
  // they wait for each other.
  template <int kRows>
  void weigh(int64_t first, const int64_t* positions, int64_t key, int n_keys, int n_vectors,
             float* decay) {
    if (n_vectors == kTileVectors) {
      weigh<kRows>(first, positions, key, n_keys, std::integral_constant<int, kTileVectors>{}, decay);
    } else {
      weigh<kRows, int>(first, positions, key, n_keys, n_vectors, decay);
    }
  }

  template <int kRows, class N>
  void weigh(int64_t first, const int64_t* positions, int64_t key, int n_keys, N n_vectors,
             float* decay) {
    const float exponent = batch_.exponent();
    float* const largest = results_.largest + first;
    for (int r = 0; r < kRows; ++r) {
      float* scores = scores_ + r * kTileKeys;
      if (batch_.soft_cap > 0) cap(scores, n_vectors);
      const int64_t end = positions[r] + 1 - key;
      const int64_t begin = batch_.window ? end - batch_.window : 0;
      if (begin > 0 || std::min<int64_t>(end, n_keys) < n_vectors * kLanes) {
        hide(scores, begin, std::min<int64_t>(end, n_keys), n_vectors);
      }
      Floats highest = load(scores);
      for (int v = 1; v < n_vectors; ++v) highest = larger(highest, load(scores + v * kLanes));
      const float new_largest = std::max(largest[r], largest_of_lanes(highest));
      decay[r] = (largest[r] - new_largest) * exponent;
      largest[r] = new_largest;
    }
    for (int r = 0; r < kRows; r += kLanes) store(decay + r, exp2(load(decay + r)));
    for (int r = 0; r < kRows; ++r) {
      const float* scores = scores_ + r * kTileKeys;
      const Floats subtracted = splat(-largest[r] * exponent);
      float* const weights = results_.weights + (first + r) * kLanes;
      Floats sum = decay[r] * load(weights);
      uint32_t* to = probabilities_ + r * (kTileKeys / Product::kDepth);
      for (int v = 0; v < n_vectors; ++v) {
        const Floats weight = exp2(fused(load(scores + v * kLanes), splat(exponent), subtracted));
        sum += weight;
        Product::store_weights(to, v * kLanes, weight);
      }
      store(weights, sum);
    }
  }

  void cap(float* scores, int n_vectors) const {
    const float outer = batch_.soft_cap, inner = batch_.scale / outer;
    for (int v = 0; v < n_vectors; ++v) {
      store(scores + v * kLanes, outer * tanh(inner * load(scores + v * kLanes)));
    }
  }

  // Leaves a row only the keys of the tile that it sees, [begin, end).
  static void hide(float* scores, int64_t begin, int64_t end, int n_vectors) {
    const auto low = static_cast<int32_t>(std::clamp<int64_t>(begin, 0, kTileKeys));
    const auto high = static_cast<int32_t>(std::clamp<int64_t>(end, 0, kTileKeys));
    for (int v = 0; v < n_vectors; ++v) {
      const Ints key = lane_indices() + v * kLanes;
      const Ints is_seen = (key >= low) & (key < high);
      float* at = scores + v * kLanes;
      store(at, select(is_seen, load(at), splat(-INFINITY)));
    }
  }

  // Takes further keys of `n_rows` rows into their results.
  [[gnu::noinline]] void fold(const Results& total, const Results& more, int64_t n_rows) const {
    const float exponent = batch_.exponent();
    for (int64_t row = 0; row < n_rows; ++row) {
      const float largest = std::max(total.largest[row], more.largest[row]);
      const Floats before = exp2(splat((total.largest[row] - largest) * exponent));
      const Floats share = exp2(splat((more.largest[row] - largest) * exponent));
      const auto add = [&](float* to, const float* from) {
        store(to, fused(share, load(from), before * load(to)));
      };
      for (int at = 0; at < padded_dim_; at += kLanes) {
        add(total.sums + row * padded_dim_ + at, more.sums + row * padded_dim_ + at);
      }
      add(total.weights + row * kLanes, more.weights + row * kLanes);
      total.largest[row] = largest;
    }
  }

  void finish(const Piece& piece, const Results& results) {
    float* sums = results.sums;
    const float* weights = results.weights;
    const float* largest = results.largest;
    for_each_row(piece, [&](int64_t token, int64_t head) {
      Product::restore_order(sums, value_dim_);
      T* to = out(token, head);
      float total = sum_of_lanes(load(weights));
      if (batch_.sinks != nullptr) total += sink_weight(head, *largest);
      const float factor = 1 / total;
      for (int at = 0; at < value_dim_; at += kLanes) {
        store_up_to(to + at, factor * load(sums + at), value_dim_ - at);
      }
      sums += padded_dim_;
      weights += kLanes;
      ++largest;
    });
  }

  // The weight of a head's sink beside those of keys, of which the largest score has a weight of 1. More
  // than 2^126 leaves nothing of them either.
  float sink_weight(int64_t head, float largest) const {
    const float exponent = batch_.sinks[head] * kLog2E - largest * batch_.exponent();
    return exp2(splat(std::min(exponent, 126.0f)))[0];
  }

  static thread_local Scratch scratch_;
  const Batch<T>& batch_;
  int head_dim_;
  int head_words_;  // of one head of one token
  int value_dim_;
  int padded_dim_;  // of values

  // Rows are those of the piece's first K/V head, then those of the next; head by head within a token.
  uint32_t* queries_;   // [rows, head_words]
  Results results_;     // of the segment
  Results total_;       // of the segments before
  int64_t* positions_;  // [rows of one K/V head]
  uint32_t* packed_keys_;
  uint32_t* packed_values_;
  float* scores_;            // [kBlockRows, kTileKeys]
  uint32_t* probabilities_;  // [kBlockRows, kTileKeys / kDepth]

  // Where each key of a tile begins in storage; of this tile and of the next one, which is fetched.
  std::array<int64_t, kTileKeys> offsets_{};
  std::array<int64_t, kTileKeys> next_offsets_{};
  Ahead keys_ahead_;
  Ahead values_ahead_;
  int n_fetched_ = 0;  // lines for each vector of keys of a tile whose values are not packed
};

template <class T, class Product>
thread_local Scratch Worker<T, Product>::scratch_;

// The work of a batch, largest piece first.
template <class T>
std::vector<Piece> divide(const Batch<T>& batch, int n_threads) {
  const int64_t n_wanted = n_threads == 1 ? 1 : n_threads * kPiecesPerThread;
  int64_t most_rows = kPieceRows;
  const auto queries_per_piece = [&] { return std::max<int64_t>(1, most_rows / batch.group_size); };
  const auto n_pieces = [&] {
    int64_t n = 0;
    for (int64_t span = 0; span < batch.n_spans; ++span) {
      n += (batch.n_tokens[span] + queries_per_piece() - 1) / queries_per_piece();
    }
    return n * batch.n_kv_heads;
  };
  while (most_rows > kFewestRows && n_pieces() < n_wanted) most_rows /= 2;

  std::vector<Piece> whole;
  int64_t total = 0, token = 0;
  for (int64_t span = 0; span < batch.n_spans; ++span) {
    const int64_t n_queries = queries_per_piece(), end_token = token + batch.n_tokens[span];
    int64_t position = batch.starts[span];
    while (token < end_token) {
      const int64_t n = std::min(n_queries, end_token - token);
      const int64_t first_seen = batch.window ? std::max<int64_t>(position + 1 - batch.window, 0) : 0;
      const int64_t first_key = first_seen / kTileKeys * kTileKeys;
      // A query that sees the whole span is at its end, as far as keys are concerned.
      const int64_t seen_from =
          batch.is_causal ? position : batch.starts[span] + batch.n_tokens[span] - 1;
      const int64_t end_key = batch.is_causal ? position + n : seen_from + 1;
      // Packing a tile costs about as much as eight rows over it.
      const int64_t cost = (end_key - first_key) * (n * batch.group_size + 8);
      whole.push_back({span, token, seen_from, n, 0, batch.n_kv_heads, first_key, end_key, cost});
      total += cost * batch.n_kv_heads;
      token += n;
      position += n;
    }
  }

  const int64_t most = total / n_wanted + 1;
  std::vector<Piece> pieces;
  int64_t n_results = 0;
  for (const Piece& piece : whole) {
    // Decodes keep their heads together, whose keys lie side by side; if they are too large, heads
    // are separated first, because that is free, and then keys.
    const bool is_small = piece.n_queries * batch.group_size <= kFewestRows;
    const int64_t heads =
        is_small ? std::clamp<int64_t>(most / piece.cost, 1, batch.n_kv_heads) : 1;
    const int64_t first_segment = segment_of(piece.first_key);
    const int64_t n_segments = segment_of(piece.end_key - 1) + 1 - first_segment;
    const int64_t parts = std::clamp<int64_t>(piece.cost / most, 1, n_segments);
    for (int64_t head = 0; head < batch.n_kv_heads; head += heads) {
      Piece share = piece;
      share.first_kv_head = head;
      share.n_kv_heads = std::min(heads, batch.n_kv_heads - head);
      share.n_parts = parts;
      share.first_segment = first_segment;
      share.n_segments = n_segments;
      share.first_result = parts > 1 ? n_results : -1;
      share.cost = piece.cost * share.n_kv_heads / parts;
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t begin = (first_segment + n_segments * i / parts) * kSegmentKeys;
        const int64_t end = (first_segment + n_segments * (i + 1) / parts) * kSegmentKeys;
        share.first_key = std::max(piece.first_key, begin);
        share.end_key = std::min(piece.end_key, end);
        pieces.push_back(share);
      }
      if (parts > 1) n_results += n_segments;
    }
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  return pieces;
}

template <class T>
void attention(const Batch<T>& batch) {
  using Work = Worker<T, Product<T>>;
  const std::vector<Piece> pieces = divide(batch, omp_get_max_threads());
  if (pieces.empty()) return;

  // Of pieces with divided keys: results of segments, and how many parts are done, by `first_result`.
  int64_t n_results = 0, most_rows = 0;
  for (const Piece& piece : pieces) {
    if (piece.first_result < 0) continue;
    n_results = std::max(n_results, piece.first_result + piece.n_segments);
    most_rows = std::max(most_rows, piece.n_queries * batch.group_size * piece.n_kv_heads);
  }
  const int64_t result_size =
      Results::floats(most_rows, round_up(static_cast<int>(batch.value_dim), kLanes));
  const std::unique_ptr<float[]> results(new float[n_results * result_size]);
  std::vector<std::atomic<int64_t>> n_done(n_results);

  // Every other thread begins with the smallest pieces: these are decodes, which wait for memory while
  // prompts compute.
  std::atomic<size_t> n_claimed{0}, n_claimed_from[2] = {0, 0};
  std::atomic<bool> is_out_of_memory{false};
  const int n_threads = static_cast<int>(std::min<size_t>(omp_get_max_threads(), pieces.size()));
  const auto run_pieces = [&] {
    Work work(batch);
    const bool is_from_back = omp_get_thread_num() % 2;
    std::atomic<size_t>& n_mine = n_claimed_from[is_from_back];
    const auto claim = [&]() -> const Piece* {
      if (n_claimed.fetch_add(1, std::memory_order_relaxed) >= pieces.size()) return nullptr;
      const size_t i = n_mine.fetch_add(1, std::memory_order_relaxed);
      return &pieces[is_from_back ? pieces.size() - 1 - i : i];
    };
    const Piece* piece = claim();
    if (piece != nullptr) work.begin(*piece);
    while (piece != nullptr) {
      const Piece* following = nullptr;
      const auto claim_following = [&] { return following = claim(); };
      if (piece->first_result < 0) {
        work.run(*piece, nullptr, claim_following);
      } else {
        float* first = results.get() + piece->first_result * result_size;
        const int64_t n_before = segment_of(piece->first_key) - piece->first_segment;
        work.run(*piece, first + n_before * work.result_floats(*piece), claim_following);
        // The thread that finishes the last part combines all parts.
        auto& done = n_done[piece->first_result];
        if (done.fetch_add(1, std::memory_order_acq_rel) == piece->n_parts - 1) {
          work.combine(*piece, first);
        }
      }
      piece = following;
    }
  };
#pragma omp parallel num_threads(n_threads)
  {
    // A piece that is left over keeps no other thread waiting.
    if (status_of(run_pieces) != kDone) is_out_of_memory.store(true, std::memory_order_relaxed);
  }
  if (is_out_of_memory) throw std::bad_alloc();
}

}  // namespace
}  // namespace orcinus

ORCINUS_EXPORT(orcinus::Status, attention, int64_t element, const void* queries,
               int64_t query_stride, const void* keys, const void* values, void* out,
               const int64_t* starts, const int64_t* n_tokens, const int64_t* blocks,
               int64_t n_spans, int64_t n_columns, int64_t n_kv_heads, int64_t group_size,
               int64_t head_dim, int64_t value_dim, int64_t block_size, int64_t window, float scale,
               float soft_cap, const float* sinks, int64_t is_causal) {
  using namespace orcinus;
  return status_of([&] {
    with_element(element, [&](auto type) {
      using T = typename decltype(type)::type;
      attention(Batch<T>{static_cast<const T*>(queries), query_stride, static_cast<const T*>(keys),
                         static_cast<const T*>(values), static_cast<T*>(out), starts, n_tokens,
                         blocks, n_spans, n_columns, n_kv_heads, group_size, head_dim, value_dim,
                         block_size, window, scale, soft_cap, sinks, is_causal != 0});
    });
  });
}
