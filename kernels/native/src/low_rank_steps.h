// The step that adds the products of adapters to a product; `look_up_steps.h` says what steps are.

#pragma once

#include <cstring>

#include "look_up_steps.h"
#include "program.h"

namespace orcinus {

// The two matrices by which an adapter changes some neighbouring outputs of a product.
struct LowRank {
  int64_t adapter;
  int64_t first;
  Weight down;
  Weight up;
  ORCINUS_FIELDS(LowRank, adapter, first, down, up)
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
    int64_t last = -1;  // the adapter whose inputs are gathered
    for (const LowRank* one = each.first; one < each.first + each.n; ++one) {
      const int64_t begin = of.begins[one->adapter];
      const int64_t n = of.begins[one->adapter + 1] - begin;
      if (n > 0) add(batch, *one, of.rows + begin, n, one->adapter != last);
      last = one->adapter;
    }
  }

 private:
  // Adds the products of one adapter to its `n` rows. Neighbouring rows need not be copied.
  void add(const Batch& batch, const LowRank& one, const int64_t* rows, int64_t n,
           bool is_new) const {
    const Buffer& from = batch.buffers[x];
    const Buffer& to = batch.buffers[out];
    const int64_t in_bytes = from.row_bytes(), out_bytes = to.row_bytes();
    const bool is_dense = rows[n - 1] - rows[0] == n - 1;
    char* inputs = from.data + rows[0] * in_bytes;
    if (!is_dense) {
      inputs = batch.buffers[gathered].data;
      if (is_new) gather(from.data, rows, inputs, n, in_bytes);
    }
    char* between = batch.buffers[inner].data;
    one.down.multiply(from.element, inputs, nullptr, nullptr, between, n);
    if (is_dense && one.up.n_out == to.width) {
      char* sums = to.data + rows[0] * out_bytes;
      one.up.multiply(from.element, between, nullptr, sums, sums, n);
      return;
    }
    const int64_t part_bytes = out_bytes / to.width * one.up.n_out;
    char* table = to.data + out_bytes / to.width * one.first;
    char* sums = batch.buffers[outer].data;
    for_rows(n, 2 * part_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(sums + i * part_bytes, table + rows[i] * out_bytes, part_bytes);
      }
    });
    one.up.multiply(from.element, between, nullptr, sums, sums, n);
    for_rows(n, 2 * part_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(table + rows[i] * out_bytes, sums + i * part_bytes, part_bytes);
      }
    });
  }
};

}  // namespace orcinus
