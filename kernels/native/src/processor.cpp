// Tells which features this processor has, and which sources a library is made of.
//
// Every build contains this file. A library that consists of it alone runs on every processor, so
// that Python can choose a build before it loads one.

#include <cstring>

// Identifies the sources: the digest from `kernels/build.py`, which looks for it in the library's file.
extern "C" const char* orcinus_sources() { return ORCINUS_SOURCES; }

// Returns whether this processor and its operating system support `feature`, which
// `kernels.build.instruction_sets` names as the compiler does: 1 or 0, or -1 for an unknown name.
extern "C" int orcinus_has_feature(const char* feature) {
#if defined(__x86_64__)
#define ORCINUS_FEATURE(name) \
  if (!std::strcmp(feature, name)) return __builtin_cpu_supports(name) ? 1 : 0;
  ORCINUS_FEATURE("x86-64-v3")
  ORCINUS_FEATURE("x86-64-v4")
  ORCINUS_FEATURE("avx512bf16")
  ORCINUS_FEATURE("avx512vnni")
#undef ORCINUS_FEATURE
#endif
  return -1;
}
