// Element types as the callers name them.

#pragma once

#include "vectors.h"

namespace orcinus {

enum Element : int64_t { kFloat32 = 0, kBFloat16 = 1 };

template <class T>
struct Type {
  using type = T;
};

// Calls `f` with the `Type` that `element` names.
template <class F>
inline void with_element(int64_t element, const F& f) {
  if (element == kFloat32) {
    f(Type<float>{});
  } else {
    f(Type<BFloat16>{});
  }
}

}  // namespace orcinus
