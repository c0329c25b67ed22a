// Steps that mix the tokens of a sequence; `look_up_steps.h` says what steps are.

#pragma once

#include <cmath>
#include <cstring>

#include "program.h"
#include "threads.h"

namespace orcinus {

struct Heads {
  int64_t n_heads;
  int64_t n_kv_heads;
  int64_t head_dim;
  ORCINUS_FIELDS(Heads, n_heads, n_kv_heads, head_dim)
};

// Norms over each head of queries and of keys; without weights there are none.
struct HeadNorms {
  Array q;
  Array k;
  float eps;
  ORCINUS_FIELDS(HeadNorms, q, k, eps)
};

struct RotaryWriteKV {
  static constexpr auto kKind = &Seconds::other;
  Place qkv;
  Place cos;
  Place sin;
  Heads heads;
  HeadNorms norms;
  int64_t layer;
  ORCINUS_FIELDS(RotaryWriteKV, qkv, cos, sin, heads, norms, layer)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[qkv];
    const LayerKV& kv = batch.kv[layer];
    orcinus_rotary_write_kv(of.element, of.data, batch.buffers[cos].data, batch.buffers[sin].data,
                            kv.keys, kv.values, batch.slots[kv.group], batch.n_tokens, heads.n_heads,
                            heads.n_kv_heads, heads.head_dim, norms.q.element, norms.q.data,
                            norms.k.data, norms.eps);
  }
};

struct WriteKV {
  static constexpr auto kKind = &Seconds::other;
  Place qkv;
  Heads heads;
  int64_t layer;
  ORCINUS_FIELDS(WriteKV, qkv, heads, layer)

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[qkv];
    const LayerKV& kv = batch.kv[layer];
    const int64_t row = of.row_bytes(), head = row / of.width * heads.head_dim;
    const char* keys = of.data + heads.n_heads * head;
    const int64_t size = heads.n_kv_heads * head;
    orcinus_write_kv(keys, row, keys + size, row, kv.keys, kv.values, batch.slots[kv.group],
                     batch.n_tokens, size);
  }
};

struct AttentionForm {
  int64_t window;  // 0: none
  float scale;     // 0: 1 / sqrt(head_dim)
  float soft_cap;  // 0: none
  int64_t is_causal;
  ORCINUS_FIELDS(AttentionForm, window, scale, soft_cap, is_causal)
};

struct Attend {
  static constexpr auto kKind = &Seconds::attention;
  Place qkv;
  Heads heads;
  AttentionForm form;
  Array sinks;  // perhaps none
  int64_t layer;
  int64_t n_shared;  // 0: values lie beside keys
  Place out;
  ORCINUS_FIELDS(Attend, qkv, heads, form, sinks, layer, n_shared, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[qkv];
    const LayerKV& kv = batch.kv[layer];
    // In double and then rounded, to the same float as Python's `head_dim ** -0.5`. The function pow
    // would need glibc 2.29.
    const float scale =
        form.scale != 0 ? form.scale : static_cast<float>(1 / std::sqrt(double(heads.head_dim)));
    const char* values = n_shared == 0 ? kv.values : kv.keys;
    const int64_t value_dim = n_shared == 0 ? heads.head_dim : n_shared;
    check(orcinus_attention(from.element, from.data, from.width, kv.keys, values,
                            batch.buffers[out].data, batch.starts, batch.counts,
                            batch.blocks[kv.group], batch.n_spans, batch.n_columns,
                            heads.n_kv_heads, heads.n_heads / heads.n_kv_heads, heads.head_dim,
                            value_dim, kv.block_size, form.window, scale, form.soft_cap,
                            static_cast<const float*>(sinks.data), form.is_causal));
  }
};

// Heads of `x` and `out` lie side by side, and what turns is at the end of each.
struct TurnHeads {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place cos;
  Place sin;
  int64_t n_heads;
  Place out;
  ORCINUS_FIELDS(TurnHeads, x, cos, sin, n_heads, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    const int64_t size = batch.buffers[cos].width, element_bytes = from.row_bytes() / from.width;
    const int64_t from_size = from.width / n_heads, to_size = to.width / n_heads;
    orcinus_rotary(from.element, from.data + (from_size - size) * element_bytes, from.width,
                   from_size, batch.buffers[cos].data, batch.buffers[sin].data,
                   to.data + (to_size - size) * element_bytes, to.width, to_size, batch.n_tokens,
                   n_heads, size);
  }
};

// Heads of `x` and `out` lie side by side, and inputs and outputs are at the beginning of each.
struct MultiplyHeads {
  static constexpr auto kKind = &Seconds::linear;
  Place x;
  HeadWeights weight;
  Place out;
  ORCINUS_FIELDS(MultiplyHeads, x, weight, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    orcinus_heads(from.element, from.data, from.width, from.width / weight.n_heads, weight.packed,
                  to.data, to.width, to.width / weight.n_heads, batch.n_tokens, weight.n_heads,
                  weight.n_in, weight.n_out);
  }
};

struct WriteLatents {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  int64_t layer;
  ORCINUS_FIELDS(WriteLatents, x, layer)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const LayerKV& kv = batch.kv[layer];
    const int64_t* slots = batch.slots[kv.group];
    const int64_t n_bytes = from.row_bytes();
    for_rows(batch.n_tokens, 2 * n_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        std::memcpy(kv.keys + slots[token] * n_bytes, from.data + token * n_bytes, n_bytes);
      }
    });
  }
};

struct DeltaNetForm {
  int64_t n_key_heads;
  int64_t n_value_heads;
  int64_t key_dim;
  int64_t value_dim;
  Array conv;
  Array decay_rate;
  Array step_bias;
  Array norm;
  float eps;
  ORCINUS_FIELDS(DeltaNetForm, n_key_heads, n_value_heads, key_dim, value_dim, conv, decay_rate,
                 step_bias, norm, eps)
};

struct RunDeltaNet {
  static constexpr auto kKind = &Seconds::other;
  Place projected;
  DeltaNetForm form;
  int64_t kernel_size;
  float length_eps;
  int64_t layer;
  Place out;
  ORCINUS_FIELDS(RunDeltaNet, projected, form, kernel_size, length_eps, layer, out)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[projected];
    const LayerKV& stored = batch.kv[layer];
    const StateSpans& spans = batch.states;
    const auto floats = [](const Array& array) { return static_cast<const float*>(array.data); };
    check(orcinus_delta_net(from.element, from.data, stored.keys,
                            reinterpret_cast<float*>(stored.values), spans.first_tokens,
                            spans.n_tokens, spans.rows, spans.start_positions,
                            batch.buffers[out].data, spans.n, form.n_key_heads,
                            form.n_value_heads, form.key_dim, form.value_dim, kernel_size,
                            floats(form.conv), floats(form.decay_rate), floats(form.step_bias),
                            floats(form.norm), form.eps, length_eps));
  }
};

}  // namespace orcinus
