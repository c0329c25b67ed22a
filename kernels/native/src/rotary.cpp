// Rotary position embedding, halves paired, and the storing of keys and values in their slots.
//
// All of it moves memory: every element of queries, keys and values is read once and written once,
// with 3 operations between for those that turn. A head that is normalised first is read from memory
// once, and for its sum of squares from the first-level cache.

#include <cmath>

#include "element.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

// A head as it is.
template <class T>
struct Plain {
  const T* head;

  Floats load(int64_t at, int64_t n) const { return load_up_to(head + at, n); }
};

// A head that is scaled to a mean square of one, and by weights.
template <class T, class W>
struct Normal {
  const T* head;
  const W* weight;
  float factor;

  Normal(const T* head, const W* weight, float eps, int64_t head_dim) : head(head), weight(weight) {
    Floats squares{};
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      const Floats some = load_up_to(head + i, head_dim - i);
      squares += some * some;
    }
    factor = 1 / std::sqrt(sum_of_lanes(squares) / head_dim + eps);
  }

  Floats load(int64_t at, int64_t n) const {
    return load_up_to(head + at, n) * factor * load_up_to(weight + at, n);
  }
};

// Turns one head: `cos` and `sin` are [head_dim], the first half of `sin` negated. `to` may be where
// the head is.
template <class T, class Head>
inline void turn(const Head& from, T* to, const T* cos, const T* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    const Floats first = from.load(i, n), second = from.load(half + i, n);
    const Floats turned_first = first * load_up_to(cos + i, n) + second * load_up_to(sin + i, n);
    const Floats turned_second =
        second * load_up_to(cos + half + i, n) + first * load_up_to(sin + half + i, n);
    store_up_to(to + i, turned_first, n);
    store_up_to(to + half + i, turned_second, n);
  }
}

template <class T>
void rotary(const T* x, int64_t token_stride, int64_t head_stride, const T* cos, const T* sin, T* out,
            int64_t out_token_stride, int64_t out_head_stride, int64_t n_tokens, int64_t n_heads,
            int64_t head_dim) {
  const int64_t size = n_heads * head_dim;
  for_rows(n_tokens, 2 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < n_heads; ++head) {
        turn(Plain<T>{x + token * token_stride + head * head_stride},
             out + token * out_token_stride + head * out_head_stride, cos + token * head_dim,
             sin + token * head_dim, head_dim);
      }
    }
  });
}

// A token of `qkv` has `n_heads` queries, `n_kv_heads` keys and as many values, one after the other.
// `query` and `key` map the address of a head to the elements that turn.
template <class T, class Query, class Key>
void rotary_write_kv(T* qkv, const T* cos, const T* sin, T* keys, T* values, const int64_t* slots,
                     int64_t n_tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                     const Query& query, const Key& key) {
  const int64_t q_size = n_heads * head_dim, kv_size = n_kv_heads * head_dim;
  const int64_t size = q_size + 2 * kv_size;
  for_rows(n_tokens, 2 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      T* q = qkv + token * size;
      const T* k = q + q_size;
      const T* c = cos + token * head_dim;
      const T* s = sin + token * head_dim;
      T* stored = keys + slots[token] * kv_size;
      for (int64_t at = 0; at < q_size; at += head_dim) turn(query(q + at), q + at, c, s, head_dim);
      for (int64_t at = 0; at < kv_size; at += head_dim)
        turn(key(k + at), stored + at, c, s, head_dim);
      std::memcpy(values + slots[token] * kv_size, k + kv_size, kv_size * sizeof(T));
    }
  });
}

}  // namespace
}  // namespace orcinus

// Tokens and heads are some elements apart; `out` may be `x`.
ORCINUS_EXPORT(void, rotary, int64_t element, const void* x, int64_t token_stride,
               int64_t head_stride, const void* cos, const void* sin, void* out,
               int64_t out_token_stride, int64_t out_head_stride, int64_t n_tokens, int64_t n_heads,
               int64_t head_dim) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    rotary(static_cast<const T*>(x), token_stride, head_stride, static_cast<const T*>(cos),
           static_cast<const T*>(sin), static_cast<T*>(out), out_token_stride, out_head_stride,
           n_tokens, n_heads, head_dim);
  });
}

// Heads are normalised first if there are weights, [head_dim].
ORCINUS_EXPORT(void, rotary_write_kv, int64_t element, void* qkv, const void* cos, const void* sin,
               void* keys, void* values, const int64_t* slots, int64_t n_tokens, int64_t n_heads,
               int64_t n_kv_heads, int64_t head_dim, int64_t weight_element, const void* q_weight,
               const void* k_weight, float eps) {
  using namespace orcinus;
  with_element(element, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](const auto& query, const auto& key) {
      rotary_write_kv(static_cast<T*>(qkv), static_cast<const T*>(cos), static_cast<const T*>(sin),
                      static_cast<T*>(keys), static_cast<T*>(values), slots, n_tokens, n_heads,
                      n_kv_heads, head_dim, query, key);
    };
    if (q_weight == nullptr) {
      const auto plain = [](const T* head) { return Plain<T>{head}; };
      run(plain, plain);
      return;
    }
    with_element(weight_element, [&](auto weight_type) {
      using W = typename decltype(weight_type)::type;
      const auto normal = [&](const void* weight) {
        return [=](const T* head) {
          return Normal<T, W>(head, static_cast<const W*>(weight), eps, head_dim);
        };
      };
      run(normal(q_weight), normal(k_weight));
    });
  });
}

// Copies bytes, whatever the element type.
ORCINUS_EXPORT(void, write_kv, const char* k, int64_t k_stride, const char* v, int64_t v_stride,
               char* keys, char* values, const int64_t* slots, int64_t n_tokens, int64_t size) {
  orcinus::for_rows(n_tokens, 4 * size, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      std::memcpy(keys + slots[token] * size, k + token * k_stride, size);
      std::memcpy(values + slots[token] * size, v + token * v_stride, size);
    }
  });
}
