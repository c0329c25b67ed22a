// Rows of a tensor over the threads that PyTorch computes with.
//
// The library is not linked with an OpenMP runtime: it uses the one that PyTorch has loaded, and with
// it PyTorch's threads and their number. A second runtime would spin against the first.

#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

namespace orcinus {

// Bytes that a thread must have to do before it is worth waking: about a microsecond's.
constexpr int64_t kBytesPerThread = 16 << 10;

// Returns on how many threads rows of so many bytes are worth running.
inline int n_threads_for(int64_t n_rows, int64_t bytes_per_row) {
  const int64_t n_useful = std::min(n_rows, n_rows * bytes_per_row / kBytesPerThread);
  return static_cast<int>(std::clamp<int64_t>(n_useful, 1, omp_get_max_threads()));
}

// Calls `rows(begin, end)` for consecutive parts of [0, n_rows), at the same time.
template <class Rows>
inline void for_rows(int64_t n_rows, int64_t bytes_per_row, const Rows& rows) {
  const int n_threads = n_threads_for(n_rows, bytes_per_row);
  if (n_threads == 1) {
    rows(int64_t{0}, n_rows);
    return;
  }
#pragma omp parallel num_threads(n_threads)
  {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    rows(n_rows * i / n, n_rows * (i + 1) / n);
  }
}

}  // namespace orcinus
