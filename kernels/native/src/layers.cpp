// Consecutive layers of what descends from Llama, with the table of tokens before the first and the
// head after the last, in one call: what the operations of the other files compute, one after the
// other, and nothing else.
//
// A layer has eight operations. For each that Python calls the interpreter has to come back from memory,
// because weights have gone through the caches since.

#include <chrono>
#include <cstdint>
#include <cstring>

#include "element.h"
#include "operations.h"

namespace orcinus {

// A matrix in panels; of int8 if there are scales. What is missing is null. This and what follows is
// declared once more in `structs.py`.
struct Weight {
  const void* packed;
  const void* starts;
  const void* scales;
  const void* bias;
  int64_t n_in;
  int64_t n_out;
  int64_t finish;  // as `orcinus_linear` has it

  int64_t n_results() const { return finish == 0 ? n_out : n_out / 2; }

  void multiply(int64_t element, const void* x, const void* residual, void* out,
                int64_t n_tokens) const {
    if (scales == nullptr) {
      orcinus_linear(element, x, packed, bias, residual, out, n_tokens, n_in, n_out, finish);
    } else {
      orcinus_linear_int8(element, x, packed, starts, scales, bias, residual, out, n_tokens, n_in,
                          n_out, finish);
    }
  }
};

struct Norm {
  int64_t element;  // of the weight
  const void* weight;
  float eps;
};

struct Layer {
  Norm attention_norm;
  Weight qkv;
  Norm query_norm;  // over each head; without a weight there is none
  Norm key_norm;
  Weight output;
  Norm mlp_norm;
  Weight gate_up;
  Weight down;
  int64_t window;  // 0: none
  float scale;
  float soft_cap;  // 0: none
};

// What makes logits of hidden states.
struct Head {
  Norm norm;
  Weight weight;
};

struct Sizes {
  int64_t element;
  int64_t n_layers;
  int64_t n_heads;
  int64_t n_kv_heads;
  int64_t head_dim;
};

// What tokens and positions are looked up in.
struct Tables {
  const void* rows;  // [n_rows, hidden_size], of tokens; null: hidden states are given
  int64_t n_rows;
  const void* cos;  // [n_positions, head_dim], as the next
  const void* sin;
  int64_t n_positions;
};

struct Stage {
  Sizes sizes;
  Tables tables;
  const Layer* layers;
  const Head* head;  // null: there is none
};

// A flat batch, and where its results go.
struct Batch {
  int64_t n_tokens;
  const int64_t* ids;  // [n_tokens], as the next two; null where there are no rows
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
  int64_t* likeliest;  // [n_sampled]
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

int64_t element_bytes(const Sizes& sizes) { return sizes.element == kFloat32 ? 4 : 2; }

// Room for the angles of tokens, and for one layer's results, [n_tokens, ...] each.
struct Room {
  char* cos;
  char* sin;
  char* normalised;
  char* qkv;
  char* attended;
  char* inner;
};

void normalise(const Sizes& sizes, const Norm& norm, const void* x, void* out, int64_t n_tokens,
               int64_t size) {
  orcinus_rms_norm(sizes.element, x, norm.element, norm.weight, out, 1, n_tokens * size, n_tokens,
                   size, norm.eps);
}

void run(const Layer& layer, const Sizes& sizes, const Batch& batch, void* keys, void* values,
         char* hidden, const Room& room, Seconds& seconds) {
  const int64_t n = batch.n_tokens, element = sizes.element, hidden_size = layer.qkv.n_in;
  Stopwatch watch;

  normalise(sizes, layer.attention_norm, hidden, room.normalised, n, hidden_size);
  watch.add_to(seconds.other);
  layer.qkv.multiply(element, room.normalised, nullptr, room.qkv, n);
  watch.add_to(seconds.linear);
  orcinus_rotary_write_kv(element, room.qkv, room.cos, room.sin, keys, values, batch.slots, n,
                          sizes.n_heads, sizes.n_kv_heads, sizes.head_dim,
                          layer.query_norm.element, layer.query_norm.weight,
                          layer.key_norm.weight, layer.query_norm.eps);
  watch.add_to(seconds.other);
  orcinus_attention(element, room.qkv, layer.qkv.n_out, keys, values, room.attended, batch.starts,
                    batch.counts, batch.blocks, batch.n_spans, batch.n_columns, sizes.n_kv_heads,
                    sizes.n_heads / sizes.n_kv_heads, sizes.head_dim, batch.block_size,
                    layer.window, layer.scale, layer.soft_cap);
  watch.add_to(seconds.attention);
  layer.output.multiply(element, room.attended, hidden, hidden, n);
  watch.add_to(seconds.linear);

  normalise(sizes, layer.mlp_norm, hidden, room.normalised, n, hidden_size);
  watch.add_to(seconds.other);
  layer.gate_up.multiply(element, room.normalised, nullptr, room.inner, n);
  layer.down.multiply(element, room.inner, hidden, hidden, n);
  watch.add_to(seconds.linear);
}

int64_t n_outside(const int64_t* indices, int64_t n, int64_t limit) {
  int64_t n_wrong = 0;
  for (int64_t i = 0; i < n; ++i) n_wrong += indices[i] < 0 || indices[i] >= limit;
  return n_wrong;
}

void gather(const void* table, const int64_t* indices, char* out, int64_t n, int64_t n_bytes) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(out + i * n_bytes, static_cast<const char*>(table) + indices[i] * n_bytes, n_bytes);
  }
}

void look_up(const Tables& tables, const Sizes& sizes, const Batch& batch, int64_t hidden_size,
             char* hidden, const Room& room, Seconds& seconds) {
  const int64_t n = batch.n_tokens, n_bytes = element_bytes(sizes);
  Stopwatch watch;
  if (tables.rows != nullptr) gather(tables.rows, batch.ids, hidden, n, hidden_size * n_bytes);
  gather(tables.cos, batch.positions, room.cos, n, sizes.head_dim * n_bytes);
  gather(tables.sin, batch.positions, room.sin, n, sizes.head_dim * n_bytes);
  watch.add_to(seconds.other);
}

// Hidden states of tokens that are sampled take the places of the first ones.
void sample(const Head& head, const Sizes& sizes, const Batch& batch, char* hidden,
            const Room& room, Seconds& seconds) {
  const int64_t hidden_size = head.weight.n_in, vocab_size = head.weight.n_out;
  const int64_t n = batch.n_sampled, n_bytes = hidden_size * element_bytes(sizes);
  Stopwatch watch;
  for (int64_t i = 0; i < n; ++i) {
    if (batch.sampled[i] != i) {
      std::memcpy(hidden + i * n_bytes, hidden + batch.sampled[i] * n_bytes, n_bytes);
    }
  }
  normalise(sizes, head.norm, hidden, room.normalised, n, hidden_size);
  watch.add_to(seconds.other);
  head.weight.multiply(sizes.element, room.normalised, nullptr, batch.logits, n);
  watch.add_to(seconds.linear);
  orcinus_greedy(sizes.element, batch.logits, vocab_size, n, vocab_size, batch.likeliest);
  watch.add_to(seconds.sampling);
}

int64_t round_up_to_line(int64_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

}  // namespace
}  // namespace orcinus

using namespace orcinus;

extern "C" {

// Bytes of memory that `orcinus_layers` needs beside its tensors.
int64_t orcinus_layers_memory(const Stage* stage, int64_t n_tokens) {
  const Layer& layer = stage->layers[0];
  const int64_t n_bytes = n_tokens * element_bytes(stage->sizes);
  return 2 * round_up_to_line(stage->sizes.head_dim * n_bytes) +
         2 * round_up_to_line(layer.qkv.n_in * n_bytes) +
         round_up_to_line(layer.qkv.n_out * n_bytes) +
         round_up_to_line(layer.output.n_in * n_bytes) +
         round_up_to_line(layer.gate_up.n_results() * n_bytes);
}

// Writes to `hidden`, or turns it into, what the last of the layers makes of the batch; all layers
// have the same sizes. If logits are wanted it writes these and the likeliest tokens, and leaves
// `hidden` in disorder.
//
// Returns how many tokens and positions are not in the tables, and places that are sampled not in the
// batch; if there are any, nothing is done.
int64_t orcinus_layers(const Stage* stage, const Batch* batch, Seconds* seconds) {
  const Sizes& sizes = stage->sizes;
  const Tables& tables = stage->tables;
  const Layer& first = stage->layers[0];
  int64_t n_wrong = n_outside(batch->positions, batch->n_tokens, tables.n_positions);
  if (tables.rows != nullptr) n_wrong += n_outside(batch->ids, batch->n_tokens, tables.n_rows);
  if (batch->logits != nullptr) {
    n_wrong += n_outside(batch->sampled, batch->n_sampled, batch->n_tokens);
  }
  if (n_wrong > 0) return n_wrong;

  const int64_t n_bytes = batch->n_tokens * element_bytes(sizes);
  char* memory = batch->memory;
  const auto take = [&memory, n_bytes](int64_t size) {
    char* taken = memory;
    memory += round_up_to_line(size * n_bytes);
    return taken;
  };
  char* hidden = take(first.qkv.n_in);
  if (batch->hidden != nullptr) hidden = batch->hidden;
  Room room;
  room.cos = take(sizes.head_dim);
  room.sin = take(sizes.head_dim);
  room.normalised = take(first.qkv.n_in);
  room.qkv = take(first.qkv.n_out);
  room.attended = take(first.output.n_in);
  room.inner = take(first.gate_up.n_results());

  look_up(tables, sizes, *batch, first.qkv.n_in, hidden, room, *seconds);
  for (int64_t i = 0; i < sizes.n_layers; ++i) {
    run(stage->layers[i], sizes, *batch, batch->kv[2 * i], batch->kv[2 * i + 1], hidden, room,
        *seconds);
  }
  if (batch->logits != nullptr && batch->n_sampled > 0) {
    sample(*stage->head, sizes, *batch, hidden, room, *seconds);
  }
  return 0;
}
}
