// Steps that begin a program or its head: they look up or copy whole rows.
//
// A step is a struct with the fields of a class in `kernels/steps`, from which Python derives the same
// structure (`structs.py`). `run` computes what the class says, and `kKind` is the kind of operation that
// its time is counted for.

#pragma once

#include <cstring>

#include "program.h"
#include "threads.h"

namespace orcinus {

// Copies the rows of a table, of `n_bytes` each, that `indices` name.
inline void gather(const void* table, const int64_t* indices, char* out, int64_t n, int64_t n_bytes) {
  const char* rows = static_cast<const char*>(table);
  for_rows(n, 2 * n_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(out + i * n_bytes, rows + indices[i] * n_bytes, n_bytes);
    }
  });
}

struct Embed {
  static constexpr auto kKind = &Seconds::other;
  Array table;
  Place out;
  ORCINUS_FIELDS(Embed, table, out)

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[out];
    gather(table.data, batch.ids, to.data, batch.n_tokens, to.row_bytes());
  }
};

struct EmbedPacked {
  static constexpr auto kKind = &Seconds::other;
  Weight table;
  Place out;
  ORCINUS_FIELDS(EmbedPacked, table, out)

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
  ORCINUS_FIELDS(AddPositions, table, x)

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
  ORCINUS_FIELDS(LookUpAngles, rotary, cos, sin)

  void run(const Batch& batch) const {
    const Angles& angles = batch.angles[rotary];
    const Buffer& to = batch.buffers[cos];
    gather(angles.cos, batch.positions, to.data, batch.n_tokens, to.row_bytes());
    gather(angles.sin, batch.positions, batch.buffers[sin].data, batch.n_tokens, to.row_bytes());
  }
};

struct CopyPart {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  int64_t first;
  int64_t size;
  Place out;
  int64_t out_first;
  ORCINUS_FIELDS(CopyPart, x, first, size, out, out_first)

  void run(const Batch& batch) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    const int64_t from_row = from.row_bytes(), to_row = to.row_bytes();
    const int64_t element_bytes = from_row / from.width, n_bytes = size * element_bytes;
    const char* part = from.data + first * element_bytes;
    char* place = to.data + out_first * element_bytes;
    for_rows(batch.n_rows(from), 2 * n_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(place + i * to_row, part + i * from_row, n_bytes);
      }
    });
  }
};

struct Select {
  static constexpr auto kKind = &Seconds::other;
  Place x;
  Place out;
  ORCINUS_FIELDS(Select, x, out)

  void run(const Batch& batch) const {
    const Buffer& to = batch.buffers[out];
    gather(batch.buffers[x].data, batch.sampled, to.data, batch.n_sampled, to.row_bytes());
  }
};

}  // namespace orcinus
