// The step that adds the products of adapters to a product; `look_up_steps.h` says what steps are.

#pragma once

#include <cstring>

#include "look_up_steps.h"
#include "program.h"

namespace orcinus {

// The two matrices by which an adapter changes a product.
struct LowRank {
  int64_t adapter;
  Weight down;
  Weight up;
  ORCINUS_FIELDS(LowRank, adapter, down, up)
};

struct LowRanks {
  const LowRank* first;
  int64_t n;
  ORCINUS_FIELDS(LowRanks, first, n)
};

struct AddLowRank {
  static constexpr auto kKind = &Seconds::linear;
  Place x;
  LowRanks each;
  Place gathered;
  Place inner;
  Place outer;
  Place out;
  ORCINUS_FIELDS(AddLowRank, x, each, gathered, inner, outer, out)

  void run(const Batch& batch) const {
    const AdapterRows& of =
        batch.buffers[out].is_of_sampled ? batch.sampled_adapters : batch.adapters;
    if (of.rows == nullptr) return;
    for (const LowRank* one = each.first; one < each.first + each.n; ++one) {
      const int64_t begin = of.begins[one->adapter];
      const int64_t n = of.begins[one->adapter + 1] - begin;
      if (n > 0) add(batch, *one, of.rows + begin, n);
    }
  }

 private:
  // Adds the products of one adapter to its `n` rows. Neighbouring rows need not be copied.
  void add(const Batch& batch, const LowRank& one, const int64_t* rows, int64_t n) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    const int64_t in_bytes = from.row_bytes(), out_bytes = to.row_bytes();
    const bool is_dense = rows[n - 1] - rows[0] == n - 1;
    char* inputs = from.data + rows[0] * in_bytes;
    char* sums = to.data + rows[0] * out_bytes;
    if (!is_dense) {
      inputs = batch.buffers[gathered].data;
      sums = batch.buffers[outer].data;
      gather(from.data, rows, inputs, n, in_bytes);
      gather(to.data, rows, sums, n, out_bytes);
    }
    char* between = batch.buffers[inner].data;
    one.down.multiply(from.element, inputs, nullptr, nullptr, between, n);
    one.up.multiply(from.element, between, nullptr, sums, sums, n);
    if (!is_dense) scatter(sums, rows, to.data, n, out_bytes);
  }

  // Copies rows of `n_bytes` each to the places of a table.
  static void scatter(const char* rows, const int64_t* places, char* table, int64_t n,
                      int64_t n_bytes) {
    for_rows(n, 2 * n_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(table + places[i] * n_bytes, rows + i * n_bytes, n_bytes);
      }
    });
  }
};

}  // namespace orcinus
