// Root-mean-square and layer normalisation: float32 inside, rounded once.
//
// A row is read from memory once (2 or 4 bytes an element), from the first-level cache again, and
// written once; about 4 operations an element, so memory is the limit.

#include <cmath>

#include "element.h"
#include "operations.h"
#include "threads.h"

namespace orcinus {
namespace {

// The rows of a tensor: `n_inner` consecutive ones every `outer_stride` elements. Those of `out` are
// dense.
struct Rows {
  int64_t n_outer;
  int64_t outer_stride;
  int64_t n_inner;
  int64_t size;
};

template <class T, class Row>
void for_each_row(const Rows& rows, const T* x, T* out, const Row& row) {
  const int64_t n_bytes = rows.size * 2 * static_cast<int64_t>(sizeof(T));
  for_rows(rows.n_outer * rows.n_inner, n_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outer = i / rows.n_inner, inner = i % rows.n_inner;
      row(x + outer * rows.outer_stride + inner * rows.size, out + i * rows.size);
    }
  });
}

template <class T, class W>
void rms_norm(const Rows& rows, const T* x, const W* weight, T* out, float eps) {
  const int64_t size = rows.size;
  for_each_row(rows, x, out, [&](const T* from, T* to) {
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats some = load_up_to(from + i, size - i);
      squares += some * some;
    }
    const float factor = 1 / std::sqrt(sum_of_lanes(squares) / size + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t n = size - i;
      store_up_to(to + i, load_up_to(from + i, n) * factor * load_up_to(weight + i, n), n);
    }
  });
}

template <class T, class W>
void layer_norm(const Rows& rows, const T* x, const W* weight, const W* bias, T* out, float eps) {
  const int64_t size = rows.size;
  for_each_row(rows, x, out, [&](const T* from, T* to) {
    Floats sums{};
    for (int64_t i = 0; i < size; i += kLanes) sums += load_up_to(from + i, size - i);
    const float mean = sum_of_lanes(sums) / size;
    // The squares of the differences, not the difference of the squares: that one cancels.
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
      Floats centred = load_up_to(from + i, size - i) - mean;
      const auto n = static_cast<int32_t>(size - i);
      if (n < kLanes) centred = select(lane_indices() < n, centred, Floats{});
      squares += centred * centred;
    }
    const float factor = 1 / std::sqrt(sum_of_lanes(squares) / size + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t n = size - i;
      const Floats normal = (load_up_to(from + i, n) - mean) * factor;
      store_up_to(to + i, normal * load_up_to(weight + i, n) + load_up_to(bias + i, n), n);
    }
  });
}

}  // namespace
}  // namespace orcinus

ORCINUS_EXPORT(void, rms_norm, int64_t element, const void* x, int64_t weight_element,
               const void* weight, void* out, int64_t n_outer, int64_t outer_stride,
               int64_t n_inner, int64_t size, float eps) {
  using namespace orcinus;
  const Rows rows{n_outer, outer_stride, n_inner, size};
  with_element(element, [&](auto x_type) {
    with_element(weight_element, [&](auto weight_type) {
      using T = typename decltype(x_type)::type;
      using W = typename decltype(weight_type)::type;
      rms_norm(rows, static_cast<const T*>(x), static_cast<const W*>(weight), static_cast<T*>(out),
               eps);
    });
  });
}

ORCINUS_EXPORT(void, layer_norm, int64_t element, const void* x, int64_t weight_element,
               const void* weight, const void* bias, void* out, int64_t n_outer,
               int64_t outer_stride, int64_t n_inner, int64_t size, float eps) {
  using namespace orcinus;
  const Rows rows{n_outer, outer_stride, n_inner, size};
  with_element(element, [&](auto x_type) {
    with_element(weight_element, [&](auto weight_type) {
      using T = typename decltype(x_type)::type;
      using W = typename decltype(weight_type)::type;
      layer_norm(rows, static_cast<const T*>(x), static_cast<const W*>(weight),
                 static_cast<const W*>(bias), static_cast<T*>(out), eps);
    });
  });
}
