// What the steps of a program work on: buffers, matrices, storage, and the batch that it runs with.
// Python has these structures as well, in `structs.py`; `layout.h` holds both to each other.

#pragma once

#include <cstdint>

#include "element.h"
#include "memory.h"
#include "operations.h"

namespace orcinus {

// A dense tensor of one of the element types.
struct Array {
  const void* data;  // null: there is none
  int64_t element;
  ORCINUS_FIELDS(Array, data, element)
};

// A matrix in panels; of int8 if there are scales, and in groups if their form is there.
struct Weight {
  const void* packed;
  const void* starts;  // null without scales
  const void* scales;
  const void* groups;  // as `orcinus_linear_groups` has it; perhaps null
  int64_t n_in;
  int64_t n_out;
  Finish finish;
  ORCINUS_FIELDS(Weight, packed, starts, scales, groups, n_in, n_out, finish)

  void multiply(int64_t element, const void* x, const void* bias, const void* residual, void* out,
                int64_t n_tokens) const {
    const auto how = static_cast<int64_t>(finish);
    if (groups != nullptr) {
      check(orcinus_linear_groups(element, x, packed, groups, bias, residual, out, n_tokens, n_in,
                                  n_out, how));
    } else if (scales == nullptr) {
      check(orcinus_linear(element, x, packed, bias, residual, out, n_tokens, n_in, n_out, how));
    } else {
      check(orcinus_linear_int8(element, x, packed, starts, scales, bias, residual, out, n_tokens,
                                n_in, n_out, how));
    }
  }
};

// Numbers of every token, or of every sampled one, [n, width].
struct Buffer {
  char* data;
  int64_t width;
  int64_t element;  // negative: another type, of 8 bytes
  int64_t is_of_sampled;
  ORCINUS_FIELDS(Buffer, data, width, element, is_of_sampled)

  int64_t row_bytes() const {
    return width * (element == kFloat32 ? 4 : element == kBFloat16 ? 2 : 8);
  }
};

// Angles of every position, [n_positions, 1, head_dim] each.
struct Angles {
  const char* cos;
  const char* sin;
  ORCINUS_FIELDS(Angles, cos, sin)
};

// The matrices of heads in panels, one for each.
struct HeadWeights {
  const void* packed;
  int64_t n_heads;
  int64_t n_out;
  int64_t n_in;
  ORCINUS_FIELDS(HeadWeights, packed, n_heads, n_out, n_in)
};

// Where a layer stores keys and values, [n_blocks, block_size, n_kv_heads, head_dim] each; or the last
// inputs and the states of requests.
struct LayerKV {
  char* keys;
  char* values;
  int64_t block_size;
  int64_t group;  // the K/V group whose slots and blocks it has
  ORCINUS_FIELDS(LayerKV, keys, values, block_size, group)
};

// The spans of a batch, [n] each, as layers see them that keep states.
struct StateSpans {
  const int64_t* first_tokens;
  const int64_t* n_tokens;
  const int64_t* rows;
  const int64_t* start_positions;
  int64_t n;
  ORCINUS_FIELDS(StateSpans, first_tokens, n_tokens, rows, start_positions, n)
};

// Rows of a batch by their adapters. Null: no row has an adapter.
struct AdapterRows {
  const int64_t* rows;    // of one adapter after the other, ascending for each
  const int64_t* begins;  // where the rows of each adapter begin, and at last their number
  ORCINUS_FIELDS(AdapterRows, rows, begins)
};

// A flat batch, and what a program runs with.
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
  StateSpans states;
  AdapterRows adapters;          // of all tokens
  AdapterRows sampled_adapters;  // of the sampled ones, by their places among them
  ORCINUS_FIELDS(Batch, buffers, kv, angles, n_tokens, ids, positions, slots, starts, counts,
                 blocks, n_spans, n_columns, sampled, n_sampled, argmax, max_ids, max_positions,
                 states, adapters, sampled_adapters)

  int64_t n_rows(const Buffer& buffer) const { return buffer.is_of_sampled ? n_sampled : n_tokens; }
};

// Seconds by kind, added to what is there.
struct Seconds {
  double linear;
  double attention;
  double sampling;
  double other;
  ORCINUS_FIELDS(Seconds, linear, attention, sampling, other)
};

// The number of a buffer.
using Place = int64_t;

}  // namespace orcinus
