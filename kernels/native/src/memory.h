// Memory that operations allocate beside their tensors, and what they do when there is none.
//
// An operation throws std::bad_alloc then, but neither out of a parallel region, which would end the
// process, nor into Python: there it arrives as a status, of which `kernels/native/call.py` makes a
// MemoryError. What it was to write may be written in part by then.
//
// Sizes are counted in 64 bits. They are small multiples of those of tensors that are in memory, so
// none of them can be too large to count.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace orcinus {

constexpr int kLineBytes = 64;

// Memory that begins at a line of the cache. It is kept until more is wanted.
class Memory {
 public:
  // Returns `n_bytes`, in which is anything; throws std::bad_alloc if there are not as many.
  char* of(int64_t n_bytes) {
    if (n_bytes > size_) {
      memory_.reset();
      size_ = 0;
      const int64_t n_lines = (n_bytes + kLineBytes - 1) / kLineBytes;
      memory_.reset(static_cast<char*>(std::aligned_alloc(kLineBytes, n_lines * kLineBytes)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = n_bytes;
    }
    return memory_.get();
  }

  char* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// What an operation that allocates memory returns to Python.
using Status = int64_t;

constexpr Status kDone = 0;
constexpr Status kNoMemory = -1;

// Calls `f` and returns kDone, or kNoMemory if it has thrown std::bad_alloc.
template <class F>
inline Status status_of(const F& f) {
  try {
    f();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kDone;
}

// Throws std::bad_alloc again where one operation calls another.
inline void check(Status status) {
  if (status != kDone) throw std::bad_alloc();
}

}  // namespace orcinus
