// Tells which instruction sets this processor has, and which sources a build is made of.

#include <cstring>

// Returns the digest of the sources, from `kernels/build.py`.
extern "C" const char* orcinus_sources() { return ORCINUS_SOURCES; }

// Returns whether this processor has `name`, which is one of `kernels.build.instruction_sets`.
extern "C" bool orcinus_has_instruction_set(const char* name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512_bf16")) {
    return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni");
  }
  if (!std::strcmp(name, "avx512")) return __builtin_cpu_supports("x86-64-v4");
  if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("x86-64-v3");
#endif
  return !std::strcmp(name, "portable");
}
