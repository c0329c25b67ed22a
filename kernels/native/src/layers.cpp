// A stage of a decoder that descends from Llama, in one call: a table of tokens, layers one after the
// other, and a head. It calls the operations of the other files in the order in which Python would,
// and computes nothing itself, so results are equal to the bit.
//
// A layer has eight operations. Python would have to fetch the interpreter from memory for each of
// them, because weights have gone through the caches since the one before.

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "element.h"
#include "memory.h"
#include "operations.h"

namespace orcinus {

// The structs up to `Stage` are derived in Python from the classes of `kernels/layer.py`, field for
// field (`structs.py` says how): a field that is added there is added here in the same place.

// A dense tensor of one of the element types.
struct Array {
  const void* data;  // null: there is none
  int64_t element;
  int64_t length;  // of the first dimension
};

// A matrix in panels; of int8 if there are scales, and in groups if their form is there.
struct Weight {
  const void* packed;
  const void* starts;  // null without scales
  const void* scales;
  const void* groups;  // as `orcinus_linear_groups` has it; perhaps null
  int64_t n_in;
  int64_t n_out;
  int64_t finish;  // as `orcinus_linear` has it

  int64_t n_results() const { return finish == 0 ? n_out : n_out / 2; }

  void multiply(int64_t element, const void* x, const void* bias, const void* residual, void* out,
                int64_t n_tokens) const {
    if (groups != nullptr) {
      check(orcinus_linear_groups(element, x, packed, groups, bias, residual, out, n_tokens, n_in,
                                  n_out, finish));
    } else if (scales == nullptr) {
      check(orcinus_linear(element, x, packed, bias, residual, out, n_tokens, n_in, n_out, finish));
    } else {
      check(orcinus_linear_int8(element, x, packed, starts, scales, bias, residual, out, n_tokens,
                                n_in, n_out, finish));
    }
  }
};

struct Projection {
  Weight weight;
  Array bias;  // perhaps none

  void multiply(int64_t element, const void* x, const void* residual, void* out,
                int64_t n_tokens) const {
    weight.multiply(element, x, bias.data, residual, out, n_tokens);
  }
};

struct Norm {
  Array weight;
  float eps;
};

// Norms over each head of queries and of keys; without weights there are none.
struct HeadNorms {
  Array q;
  Array k;
  float eps;
};

struct AttentionForm {
  int64_t window;  // 0: none
  float scale;     // 0: 1 / sqrt(head_dim)
  float soft_cap;  // 0: none
};

struct Attention {
  Projection qkv;
  Projection output;
  int64_t n_heads;
  int64_t n_kv_heads;
  int64_t head_dim;
  AttentionForm form;
  HeadNorms head_norms;
  Array sinks;  // [n_heads] float32; perhaps none

  float scale() const {
    // In double and then rounded, as Python does it.
    return form.scale != 0 ? form.scale : static_cast<float>(std::pow(double(head_dim), -0.5));
  }
};

struct GatedMLP {
  Weight gate_up;
  Projection down;
};

struct Layer {
  Norm attention_norm;
  Attention attention;
  Norm mlp_norm;
  GatedMLP mlp;

  int64_t hidden_size() const { return attention.qkv.weight.n_in; }
};

// Makes logits of hidden states.
struct Head {
  Norm norm;
  Weight weight;
};

// Angles of every position, [n_positions, 1, head_dim] each.
struct Angles {
  Array cos;
  Array sin;
};

struct Stage {
  int64_t element;  // of hidden states, and with them of tables, biases, K/V and logits
  Array table;      // [n_rows, hidden_size], rows of tokens; none: hidden states are given
  Angles angles;
  Head head;  // all zeros: there is none
  const Layer* layers;
  int64_t n_layers;

  int64_t element_bytes() const { return element == kFloat32 ? 4 : 2; }
};

// A flat batch, and where its results go; declared once more in `structs.py`.
struct Batch {
  int64_t n_tokens;
  const int64_t* ids;  // [n_tokens], as the next two; null where there is no table
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* starts;  // [n_spans], as the next
  const int64_t* counts;
  const int64_t* blocks;  // [n_spans, n_columns]
  int64_t n_spans;
  int64_t n_columns;
  void* const* kv;  // keys and values of each layer, [n_blocks, block_size, n_kv_heads, head_dim]
  int64_t block_size;
  char* hidden;  // [n_tokens, hidden_size]; null, if only logits are wanted
  char* memory;  // see `orcinus_layers_memory`
  const int64_t* sampled;  // [n_sampled], places in the batch, in order
  int64_t n_sampled;
  void* logits;  // [n_sampled, vocab_size]; null: hidden states are wanted
  int64_t* argmax;  // [n_sampled], of logits; -1 where they are not finite
};

// Seconds by kind, added to what is there.
struct Seconds {
  double linear;
  double attention;
  double sampling;
  double other;
};

namespace {

// Adds the time since the last call to one kind.
class Stopwatch {
 public:
  void add_to(double& seconds) {
    const auto now = std::chrono::steady_clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Memory for the angles of tokens, and for one layer's results, [n_tokens, ...] each.
struct Room {
  char* cos;
  char* sin;
  char* normalised;
  char* qkv;
  char* attended;
  char* inner;
};

void normalise(int64_t element, const Norm& norm, const void* x, void* out, int64_t n_tokens) {
  const int64_t size = norm.weight.length;
  orcinus_rms_norm(element, x, norm.weight.element, norm.weight.data, out, 1, n_tokens * size,
                   n_tokens, size, norm.eps);
}

// Runs one layer; `hidden` is the residual stream, which it adds to.
void run(const Layer& layer, int64_t element, const Batch& batch, void* keys, void* values,
         char* hidden, const Room& room, Seconds& seconds) {
  const int64_t n = batch.n_tokens;
  const Attention& attention = layer.attention;
  const HeadNorms& norms = attention.head_norms;
  Stopwatch watch;

  normalise(element, layer.attention_norm, hidden, room.normalised, n);
  watch.add_to(seconds.other);
  attention.qkv.multiply(element, room.normalised, nullptr, room.qkv, n);
  watch.add_to(seconds.linear);
  orcinus_rotary_write_kv(element, room.qkv, room.cos, room.sin, keys, values, batch.slots, n,
                          attention.n_heads, attention.n_kv_heads, attention.head_dim,
                          norms.q.element, norms.q.data, norms.k.data, norms.eps);
  watch.add_to(seconds.other);
  check(orcinus_attention(element, room.qkv, attention.qkv.weight.n_out, keys, values,
                          room.attended, batch.starts, batch.counts, batch.blocks, batch.n_spans,
                          batch.n_columns, attention.n_kv_heads,
                          attention.n_heads / attention.n_kv_heads, attention.head_dim,
                          batch.block_size, attention.form.window, attention.scale(),
                          attention.form.soft_cap,
                          static_cast<const float*>(attention.sinks.data)));
  watch.add_to(seconds.attention);
  attention.output.multiply(element, room.attended, hidden, hidden, n);
  watch.add_to(seconds.linear);

  normalise(element, layer.mlp_norm, hidden, room.normalised, n);
  watch.add_to(seconds.other);
  layer.mlp.gate_up.multiply(element, room.normalised, nullptr, nullptr, room.inner, n);
  layer.mlp.down.multiply(element, room.inner, hidden, hidden, n);
  watch.add_to(seconds.linear);
}

// Counts the indices that are not in [0, limit).
int64_t n_outside(const int64_t* indices, int64_t n, int64_t limit) {
  int64_t n_wrong = 0;
  for (int64_t i = 0; i < n; ++i) n_wrong += indices[i] < 0 || indices[i] >= limit;
  return n_wrong;
}

// Copies the rows of a table, of `n_bytes` each, that `indices` name.
void gather(const Array& table, const int64_t* indices, char* out, int64_t n, int64_t n_bytes) {
  const char* rows = static_cast<const char*>(table.data);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(out + i * n_bytes, rows + indices[i] * n_bytes, n_bytes);
  }
}

// Looks up what the first layer is given: hidden states, if there is a table, and angles.
void look_up(const Stage& stage, const Batch& batch, char* hidden, const Room& room,
             Seconds& seconds) {
  const Layer& first = stage.layers[0];
  const int64_t n = batch.n_tokens, n_bytes = stage.element_bytes();
  const int64_t angle_bytes = first.attention.head_dim * n_bytes;
  Stopwatch watch;
  if (stage.table.data != nullptr) {
    gather(stage.table, batch.ids, hidden, n, first.hidden_size() * n_bytes);
  }
  gather(stage.angles.cos, batch.positions, room.cos, n, angle_bytes);
  gather(stage.angles.sin, batch.positions, room.sin, n, angle_bytes);
  watch.add_to(seconds.other);
}

// Writes the logits of sampled tokens and their argmax. The hidden states of these tokens take the
// places of the first ones.
void sample(const Stage& stage, const Batch& batch, char* hidden, const Room& room,
            Seconds& seconds) {
  const Head& head = stage.head;
  const int64_t vocab_size = head.weight.n_out, element = stage.element;
  const int64_t n = batch.n_sampled, n_bytes = head.weight.n_in * stage.element_bytes();
  Stopwatch watch;
  for (int64_t i = 0; i < n; ++i) {
    if (batch.sampled[i] != i) {
      std::memcpy(hidden + i * n_bytes, hidden + batch.sampled[i] * n_bytes, n_bytes);
    }
  }
  normalise(element, head.norm, hidden, room.normalised, n);
  watch.add_to(seconds.other);
  head.weight.multiply(element, room.normalised, nullptr, nullptr, batch.logits, n);
  watch.add_to(seconds.linear);
  orcinus_greedy(element, batch.logits, vocab_size, n, vocab_size, batch.argmax);
  watch.add_to(seconds.sampling);
}

int64_t round_up_to_line(int64_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

}  // namespace
}  // namespace orcinus

using namespace orcinus;

extern "C" {

// Returns the bytes of memory that `orcinus_layers` needs beside its tensors.
int64_t orcinus_layers_memory(const Stage* stage, int64_t n_tokens) {
  const Layer& layer = stage->layers[0];
  const int64_t n_bytes = n_tokens * stage->element_bytes();
  return 2 * round_up_to_line(layer.attention.head_dim * n_bytes) +
         2 * round_up_to_line(layer.hidden_size() * n_bytes) +
         round_up_to_line(layer.attention.qkv.weight.n_out * n_bytes) +
         round_up_to_line(layer.attention.output.weight.n_in * n_bytes) +
         round_up_to_line(layer.mlp.gate_up.n_results() * n_bytes);
}

// Runs a stage, all of whose layers have the same sizes. Hidden states are written to the `hidden` of
// the batch, which also holds those that come in where there is no table. If logits are wanted, it
// writes these and their argmax, and leaves `hidden` in disorder.
//
// Returns how many tokens and positions are not in the tables, and sampled places not in the batch.
// If there are any, nothing is done. Returns kNoMemory if memory ran out on the way.
int64_t orcinus_layers(const Stage* stage, const Batch* batch, Seconds* seconds) {
  const Layer& first = stage->layers[0];
  int64_t n_wrong = n_outside(batch->positions, batch->n_tokens, stage->angles.cos.length);
  if (stage->table.data != nullptr) {
    n_wrong += n_outside(batch->ids, batch->n_tokens, stage->table.length);
  }
  if (batch->logits != nullptr) {
    n_wrong += n_outside(batch->sampled, batch->n_sampled, batch->n_tokens);
  }
  if (n_wrong > 0) return n_wrong;

  const int64_t n_bytes = batch->n_tokens * stage->element_bytes();
  char* memory = batch->memory;
  const auto take = [&memory, n_bytes](int64_t size) {
    char* taken = memory;
    memory += round_up_to_line(size * n_bytes);
    return taken;
  };
  char* hidden = take(first.hidden_size());
  if (batch->hidden != nullptr) hidden = batch->hidden;
  Room room;
  room.cos = take(first.attention.head_dim);
  room.sin = take(first.attention.head_dim);
  room.normalised = take(first.hidden_size());
  room.qkv = take(first.attention.qkv.weight.n_out);
  room.attended = take(first.attention.output.weight.n_in);
  room.inner = take(first.mlp.gate_up.n_results());

  return status_of([&] {
    look_up(*stage, *batch, hidden, room, *seconds);
    for (int64_t i = 0; i < stage->n_layers; ++i) {
      run(stage->layers[i], stage->element, *batch, batch->kv[2 * i], batch->kv[2 * i + 1], hidden,
          room, *seconds);
    }
    if (batch->logits != nullptr && batch->n_sampled > 0) {
      sample(*stage, *batch, hidden, room, *seconds);
    }
  });
}
}
