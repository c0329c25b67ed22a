// A stage as a program: steps over buffers, in one call or in a few. It calls the operations of the
// other files in the order in which Python would, and computes next to nothing itself, so results are
// equal to the bit.
//
// A layer has eight operations or more. Python would have to fetch the interpreter from memory for each
// of them, because weights have gone through the caches since the one before.

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "element.h"
#include "memory.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {

// A dense tensor of one of the element types.
struct Array {
  const void* data;  // null: there is none
  int64_t element;
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

// Numbers of every token, or of every sampled one, [n, width].
struct Buffer {
  char* data;
  int64_t width;
  int64_t element;  // negative: another type, of 8 bytes
  int64_t is_of_sampled;

  int64_t row_bytes() const {
    return width * (element == kFloat32 ? 4 : element == kBFloat16 ? 2 : 8);
  }
};

// Angles of every position, [n_positions, 1, head_dim] each.
struct Angles {
  const char* cos;
  const char* sin;
};

// Where a layer stores keys and values, [n_blocks, block_size, n_kv_heads, head_dim] each.
struct LayerKV {
  char* keys;
  char* values;
  int64_t block_size;
  int64_t group;  // the K/V group whose slots and blocks it has
};

// A flat batch, and what a program runs with; declared once more in `structs.py`.
struct Batch {
  const Buffer* buffers;
  const LayerKV* kv;
  const Angles* angles;  // of each kind
  int64_t n_tokens;
  const int64_t* ids;  // [n_tokens], as the next; null where hidden states come in
  const int64_t* positions;
  const int64_t* const* slots;  // of each K/V group, [n_tokens]
  const int64_t* starts;  // [n_spans], as the next
  const int64_t* counts;
  const int64_t* const* blocks;  // of each K/V group, [n_spans, n_columns]
  int64_t n_spans;
  int64_t n_columns;
  const int64_t* sampled;  // [n_sampled], places in the batch
  int64_t n_sampled;
  int64_t* argmax;  // [n_sampled], of logits; -1 where they are not finite
  int64_t max_ids;  // tokens in tables, and positions in those of angles or learned ones
  int64_t max_positions;

  int64_t n_rows(const Buffer& buffer) const { return buffer.is_of_sampled ? n_sampled : n_tokens; }
};

// Seconds by kind, added to what is there.
struct Seconds {
  double linear;
  double attention;
  double sampling;
  double other;
};

namespace {

// The number of a buffer.
using Place = int64_t;

// Copies the rows of a table, of `n_bytes` each, that `indices` name.
void gather(const void* table, const int64_t* indices, char* out, int64_t n, int64_t n_bytes) {
  const char* rows = static_cast<const char*>(table);
  for_rows(n, 2 * n_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(out + i * n_bytes, rows + indices[i] * n_bytes, n_bytes);
    }
  });
}

// The structs from here to `Greedy` are derived in Python from the classes of `kernels/steps`,
// field for field (`structs.py` says how), and so are those within them. `run` computes what the class
// says, and `kKind` is where its time goes.

struct Embed {
  static constexpr auto kKind = &Seconds::other;
  Array table;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[out];
    gather(table.data, batch.ids, to.data, batch.n_tokens, to.row_bytes());
  }
};

struct EmbedPacked {
  static constexpr auto kKind = &Seconds::other;
  Weight table;
  Place out;

  // A row is a word of 32 bits of each step of its panel.
  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[out];
    const int64_t n_bytes = to.row_bytes(), n_steps = (n_bytes + 3) / 4;
    const int64_t panel = orcinus_linear_panel();
    const char* words = static_cast<const char*>(table.packed);
    for_rows(batch.n_tokens, kLineBytes * n_steps, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t id = batch.ids[token];
        const char* row = words + (id / panel * n_steps * panel + id % panel) * 4;
        for (int64_t at = 0; at < n_bytes; at += 4) {
          std::memcpy(to.data + token * n_bytes + at, row + at * panel,
                      std::min<int64_t>(4, n_bytes - at));
        }
      }
    });
  }
};

struct AddPositions {
  static constexpr auto kKind = &Seconds::other;
  Array table;
  Place x;

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[x];
    const char* rows = static_cast<const char*>(table.data);
    const int64_t n_bytes = to.row_bytes();
    for (int64_t token = 0; token < batch.n_tokens; ++token) {
      orcinus_add_scaled(to.element, to.data + token * n_bytes,
                         rows + batch.positions[token] * n_bytes, 1, to.width, 1.0f);
    }
  }
};

struct LookUpAngles {
  static constexpr auto kKind = &Seconds::other;
  int64_t rotary;
  Place cos;
  Place sin;

  void run(const Batch& batch) const {
    const Angles& angles = batch.angles[rotary];
    const Buffer& to = batch.buffers[cos];
    gather(angles.cos, batch.positions, to.data, batch.n_tokens, to.row_bytes());
    gather(angles.sin, batch.positions, batch.buffers[sin].data, batch.n_tokens, to.row_bytes());
  }
};

struct Select {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[out];
    gather(batch.buffers[x].data, batch.sampled, to.data, batch.n_sampled, to.row_bytes());
  }
};

struct RMSNorm {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Array weight;
  float eps;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    orcinus_rms_norm(from.element, from.data, weight.element, weight.data, batch.buffers[out].data,
                     batch.n_rows(from), from.width, 1, from.width, eps);
  }
};

// In place, and row by row: rows of the part are not dense, and the norm writes dense ones.
struct RMSNormPart {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  int64_t first;
  int64_t size;
  Array weight;
  float eps;

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    const int64_t row = of.row_bytes(), begin_of_part = row / of.width * first;
    for_rows(batch.n_rows(of), 2 * (row / of.width) * size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        char* part = of.data + i * row + begin_of_part;
        orcinus_rms_norm(of.element, part, weight.element, weight.data, part, 1, size, 1, size, eps);
      }
    });
  }
};

struct LayerNorm {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Array weight;
  Array bias;
  float eps;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    orcinus_layer_norm(from.element, from.data, weight.element, weight.data, bias.data,
                       batch.buffers[out].data, batch.n_rows(from), from.width, 1, from.width, eps);
  }
};

struct Multiply {
  static constexpr auto kKind = &Seconds::linear;
  Place x;
  Weight weight;
  Array bias;      // perhaps none
  Place residual;  // negative: none
  Place out;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    weight.multiply(from.element, from.data, bias.data,
                    residual < 0 ? nullptr : batch.buffers[residual].data, batch.buffers[out].data,
                    batch.n_rows(from));
  }
};

struct Activate {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  int64_t function;

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    if (function == 0) {
      orcinus_relu(of.element, of.data, batch.n_rows(of), of.width);
    } else if (function == 1) {
      orcinus_gelu(of.element, of.data, of.data, batch.n_rows(of), of.width);
    } else {
      orcinus_gelu_tanh(of.element, of.data, of.data, batch.n_rows(of), of.width);
    }
  }
};

struct GateForm {
  int64_t function;
  float slope;
  float limit;

  void apply(int64_t element, const void* x, void* out, int64_t n_tokens, int64_t size) const {
    if (function == 0) {
      orcinus_silu_and_mul(element, x, out, n_tokens, size);
    } else if (function == 1) {
      orcinus_gelu_and_mul(element, x, out, n_tokens, size);
    } else {
      orcinus_clamp_and_mul(element, x, out, n_tokens, size, slope, limit);
    }
  }
};

struct ApplyGate {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  GateForm form;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    form.apply(from.element, from.data, to.data, batch.n_rows(from), to.width);
  }
};

struct Heads {
  int64_t n_heads;
  int64_t n_kv_heads;
  int64_t head_dim;
};

// Norms over each head of queries and of keys; without weights there are none.
struct HeadNorms {
  Array q;
  Array k;
  float eps;
};

struct RotaryWriteKV {
  static constexpr auto kKind = &Seconds::other;
  Place qkv;
  Place cos;
  Place sin;
  Heads heads;
  HeadNorms norms;
  int64_t layer;

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
};

struct Attend {
  static constexpr auto kKind = &Seconds::attention;
  Place qkv;
  Heads heads;
  AttentionForm form;
  Array sinks;  // perhaps none
  int64_t layer;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[qkv];
    const LayerKV& kv = batch.kv[layer];
    // In double and then rounded, as Python does it.
    const float scale =
        form.scale != 0 ? form.scale : static_cast<float>(std::pow(double(heads.head_dim), -0.5));
    check(orcinus_attention(from.element, from.data, from.width, kv.keys, kv.values,
                            batch.buffers[out].data, batch.starts, batch.counts,
                            batch.blocks[kv.group], batch.n_spans, batch.n_columns,
                            heads.n_kv_heads, heads.n_heads / heads.n_kv_heads, heads.head_dim,
                            heads.head_dim, kv.block_size, form.window, scale, form.soft_cap,
                            static_cast<const float*>(sinks.data)));
  }
};

struct Add {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place y;
  float factor;

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[x];
    orcinus_add_scaled(to.element, to.data, batch.buffers[y].data, batch.n_rows(to), to.width,
                       factor);
  }
};

struct Scale {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  float factor;

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    orcinus_scale(of.element, of.data, batch.n_rows(of), of.width, factor);
  }
};

struct SoftCap {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  float cap;
  Place out;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    orcinus_soft_cap(from.element, from.data, batch.buffers[out].data, batch.n_rows(from),
                     from.width, cap);
  }
};

struct Route {
  static constexpr auto kKind = &Seconds::other;
  Place scores;
  int64_t normalises;
  Place experts;
  Place weights;

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[scores];
    const Buffer& to = batch.buffers[experts];
    orcinus_route(from.element, from.data, reinterpret_cast<int64_t*>(to.data),
                  reinterpret_cast<float*>(batch.buffers[weights].data), batch.n_rows(from),
                  from.width, to.width, normalises);
  }
};

// The first half of a gated MLP.
struct Gated {
  Weight weight;
  Array bias;     // perhaps none
  GateForm form;  // not used by a matrix that gates by itself

  void run(int64_t element, const char* x, char* both, char* out, int64_t n) const {
    if (weight.finish != 0) {
      weight.multiply(element, x, nullptr, nullptr, out, n);
    } else {
      weight.multiply(element, x, bias.data, nullptr, both, n);
      form.apply(element, both, out, n, weight.n_out / 2);
    }
  }
};

struct Expert {
  Gated gate_up;
  Weight down;
  Array down_bias;  // perhaps none
};

struct Experts {
  const Expert* first;
  int64_t n;
};

// sums[tokens[i]] += rows[i] * its share, for the `n` tokens of one expert. Products are rounded.
template <class T>
void add_shares(const T* rows, const int64_t* places, const float* shares, float* sums, int64_t n,
                int64_t n_chosen, int64_t size) {
  for_rows(n, size * static_cast<int64_t>(sizeof(T) + 8), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = rows + row * size;
      float* to = sums + places[row] / n_chosen * size;
      const float share = shares[places[row]];
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t left = size - i;
        store_up_to(to + i, load_up_to(to + i, left) + load_up_to(from + i, left) * share, left);
      }
    }
  });
}

struct RunExperts {
  static constexpr auto kKind = &Seconds::linear;
  Place x;
  Place experts;
  Place weights;
  Experts each;
  Place gathered;
  Place both;
  Place inner;
  Place outer;
  Place sums;
  Place out;

  // Places of `chosen` in the order of their experts, and behind them where the places of each begin.
  const int64_t* sorted(const int64_t* chosen, int64_t n) const {
    thread_local Memory memory;
    auto* places = reinterpret_cast<int64_t*>(memory.of((n + each.n + 1) * sizeof(int64_t)));
    int64_t* begins = places + n;
    std::fill(begins, begins + each.n + 1, 0);
    for (int64_t i = 0; i < n; ++i) ++begins[chosen[i] + 1];
    for (int64_t i = 0; i < each.n; ++i) begins[i + 1] += begins[i];
    for (int64_t i = 0; i < n; ++i) places[begins[chosen[i]]++] = i;
    for (int64_t i = each.n; i > 0; --i) begins[i] = begins[i - 1];
    begins[0] = 0;
    return places;
  }

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    const Buffer& choice = batch.buffers[experts];
    const int64_t n_tokens = batch.n_rows(from), n_chosen = choice.width;
    const int64_t n = n_tokens * n_chosen, n_bytes = from.row_bytes();
    const int64_t* places = sorted(reinterpret_cast<const int64_t*>(choice.data), n);
    const int64_t* begins = places + n;
    const auto data = [&](Place place) { return batch.buffers[place].data; };
    auto* total = reinterpret_cast<float*>(data(sums));
    std::memset(total, 0, n_tokens * from.width * sizeof(float));
    for (int64_t i = 0; i < each.n; ++i) {
      const int64_t* mine = places + begins[i];
      const int64_t n_mine = begins[i + 1] - begins[i];
      if (n_mine == 0) continue;
      for (int64_t row = 0; row < n_mine; ++row) {
        std::memcpy(data(gathered) + row * n_bytes, from.data + mine[row] / n_chosen * n_bytes,
                    n_bytes);
      }
      const Expert& expert = each.first[i];
      expert.gate_up.run(from.element, data(gathered), data(both), data(inner), n_mine);
      expert.down.multiply(from.element, data(inner), expert.down_bias.data, nullptr, data(outer),
                           n_mine);
      with_element(from.element, [&](auto type) {
        using T = typename decltype(type)::type;
        add_shares(reinterpret_cast<const T*>(data(outer)), mine,
                   reinterpret_cast<const float*>(data(weights)), total, n_mine, n_chosen,
                   from.width);
      });
    }
    with_element(to.element, [&](auto type) {
      using T = typename decltype(type)::type;
      T* rounded = reinterpret_cast<T*>(to.data);
      const int64_t n_all = n_tokens * from.width;
      for (int64_t i = 0; i < n_all; i += kLanes) {
        store_up_to(rounded + i, load_up_to(total + i, n_all - i), n_all - i);
      }
    });
  }
};

struct SigmoidAndMul {
  static constexpr auto kKind = &Seconds::other;
  Place gates;
  Place x;

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[x];
    const Buffer& gate = batch.buffers[gates];
    orcinus_sigmoid_and_mul(of.element, gate.data, gate.width, gate.width, of.data, of.data,
                            batch.n_rows(of), of.width);
  }
};

struct Greedy {
  static constexpr auto kKind = &Seconds::sampling;
  Place logits;

  void run(const Batch& batch) const {
    const Buffer& of = batch.buffers[logits];
    orcinus_greedy(of.element, of.data, of.width, batch.n_rows(of), of.width, batch.argmax);
  }
};

// One step of a program.
struct Step {
  int64_t kind;  // its number in `STEPS`
  const void* what;
};

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

template <class What>
void run(const void* what, const Batch& batch, Stopwatch& watch, Seconds& seconds) {
  static_cast<const What*>(what)->run(batch);
  watch.add_to(seconds.*What::kKind);
}

using Run = void (*)(const void*, const Batch&, Stopwatch&, Seconds&);

template <class... What>
constexpr Run run_of(int64_t kind) {
  constexpr Run table[] = {run<What>...};
  return table[kind];
}

// Counts the indices that are not in [0, limit).
int64_t n_outside(const int64_t* indices, int64_t n, int64_t limit) {
  int64_t n_wrong = 0;
  for (int64_t i = 0; i < n; ++i) n_wrong += indices[i] < 0 || indices[i] >= limit;
  return n_wrong;
}

}  // namespace
}  // namespace orcinus

using namespace orcinus;

extern "C" {

// Returns how many tokens and positions of a batch are not in the tables, and how many sampled places
// not in the batch. With any of these no step may run.
int64_t orcinus_layers_n_wrong(const Batch* batch) {
  int64_t n_wrong = n_outside(batch->positions, batch->n_tokens, batch->max_positions);
  if (batch->ids != nullptr) n_wrong += n_outside(batch->ids, batch->n_tokens, batch->max_ids);
  return n_wrong + n_outside(batch->sampled, batch->n_sampled, batch->n_tokens);
}

// Runs `n_steps` steps. Returns kDone, or kNoMemory if memory ran out on the way.
int64_t orcinus_layers(const Step* steps, int64_t n_steps, const Batch* batch, Seconds* seconds) {
  return status_of([&] {
    Stopwatch watch;
    for (const Step* step = steps; step < steps + n_steps; ++step) {
      // As in `STEPS`.
      run_of<Embed, EmbedPacked, AddPositions, LookUpAngles, Select, RMSNorm, RMSNormPart, LayerNorm,
             Multiply, Activate, ApplyGate, RotaryWriteKV, WriteKV, Attend, Add, Scale, SoftCap,
             Route, RunExperts, SigmoidAndMul, Greedy>(step->kind)(step->what, *batch, watch, *seconds);
    }
  });
}
}
