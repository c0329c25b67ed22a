// Consecutive layers of what descends from Llama, and the head after the last, in one call: what the
// operations of the other files compute, one after the other, and nothing else.
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
// declared once more in `layers.py`.
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
  int64_t block_size;
};

struct Tokens {
  int64_t n_tokens;
  const void* cos;  // [n_tokens, head_dim], as the next
  const void* sin;
  const int64_t* slots;  // [n_tokens]
  const int64_t* starts;  // [n_spans], as the next
  const int64_t* counts;
  const int64_t* blocks;  // [n_spans, n_columns]
  int64_t n_spans;
  int64_t n_columns;
};

// Tokens whose logits are wanted.
struct Sampled {
  const int64_t* tokens;  // [n], in order
  int64_t n;
  void* logits;  // [n, vocab_size]
};

// Seconds by kind, added to what is there.
struct Seconds {
  double linear;
  double attention;
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

// Room for one layer's results, [n_tokens, ...] each.
struct Room {
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

void run(const Layer& layer, const Sizes& sizes, const Tokens& tokens, void* keys, void* values,
         void* hidden, const Room& room, Seconds& seconds) {
  const int64_t n = tokens.n_tokens, element = sizes.element, hidden_size = layer.qkv.n_in;
  Stopwatch watch;

  normalise(sizes, layer.attention_norm, hidden, room.normalised, n, hidden_size);
  watch.add_to(seconds.other);
  layer.qkv.multiply(element, room.normalised, nullptr, room.qkv, n);
  watch.add_to(seconds.linear);
  orcinus_rotary_write_kv(element, room.qkv, tokens.cos, tokens.sin, keys, values, tokens.slots, n,
                          sizes.n_heads, sizes.n_kv_heads, sizes.head_dim,
                          layer.query_norm.element, layer.query_norm.weight,
                          layer.key_norm.weight, layer.query_norm.eps);
  watch.add_to(seconds.other);
  orcinus_attention(element, room.qkv, layer.qkv.n_out, keys, values, room.attended, tokens.starts,
                    tokens.counts, tokens.blocks, tokens.n_spans, tokens.n_columns,
                    sizes.n_kv_heads, sizes.n_heads / sizes.n_kv_heads, sizes.head_dim,
                    sizes.block_size, layer.window, layer.scale, layer.soft_cap);
  watch.add_to(seconds.attention);
  layer.output.multiply(element, room.attended, hidden, hidden, n);
  watch.add_to(seconds.linear);

  normalise(sizes, layer.mlp_norm, hidden, room.normalised, n, hidden_size);
  watch.add_to(seconds.other);
  layer.gate_up.multiply(element, room.normalised, nullptr, room.inner, n);
  layer.down.multiply(element, room.inner, hidden, hidden, n);
  watch.add_to(seconds.linear);
}

// Hidden states of tokens that are sampled take the places of the first ones.
void sample(const Head& head, const Sizes& sizes, const Sampled& sampled, char* hidden,
            const Room& room, Seconds& seconds) {
  const int64_t hidden_size = head.weight.n_in;
  const int64_t n_bytes = hidden_size * (sizes.element == kFloat32 ? 4 : 2);
  Stopwatch watch;
  for (int64_t i = 0; i < sampled.n; ++i) {
    if (sampled.tokens[i] != i) {
      std::memcpy(hidden + i * n_bytes, hidden + sampled.tokens[i] * n_bytes, n_bytes);
    }
  }
  normalise(sizes, head.norm, hidden, room.normalised, sampled.n, hidden_size);
  watch.add_to(seconds.other);
  head.weight.multiply(sizes.element, room.normalised, nullptr, sampled.logits, sampled.n);
  watch.add_to(seconds.linear);
}

int64_t round_up_to_line(int64_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

}  // namespace
}  // namespace orcinus

using namespace orcinus;

extern "C" {

// Bytes that `orcinus_layers` needs beside its tensors.
int64_t orcinus_layers_room(const Layer* layers, const Sizes* sizes, int64_t n_tokens) {
  const int64_t n_bytes = n_tokens * (sizes->element == kFloat32 ? 4 : 2);
  return round_up_to_line(layers->qkv.n_in * n_bytes) +
         round_up_to_line(layers->qkv.n_out * n_bytes) +
         round_up_to_line(layers->output.n_in * n_bytes) +
         round_up_to_line(layers->gate_up.n_results() * n_bytes);
}

// Turns `hidden` [n_tokens, hidden_size] into what the last of the layers makes of it. `kv` has the
// keys and the values of each layer, [n_blocks, block_size, n_kv_heads, head_dim]; all layers have the
// same sizes. If there is a `head`, writes the logits of what is `sampled` and leaves `hidden` in
// disorder.
void orcinus_layers(const Layer* layers, const Head* head, const Sizes* sizes, const Tokens* tokens,
                    const Sampled* sampled, void* const* kv, char* hidden, char* memory,
                    Seconds* seconds) {
  const int64_t n_bytes = tokens->n_tokens * (sizes->element == kFloat32 ? 4 : 2);
  Room room;
  room.normalised = memory;
  room.qkv = room.normalised + round_up_to_line(layers->qkv.n_in * n_bytes);
  room.attended = room.qkv + round_up_to_line(layers->qkv.n_out * n_bytes);
  room.inner = room.attended + round_up_to_line(layers->output.n_in * n_bytes);
  for (int64_t i = 0; i < sizes->n_layers; ++i) {
    run(layers[i], *sizes, *tokens, kv[2 * i], kv[2 * i + 1], hidden, room, *seconds);
  }
  if (head != nullptr && sampled->n > 0) sample(*head, *sizes, *sampled, hidden, room, *seconds);
}
}
