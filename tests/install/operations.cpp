// Calls operations of a native library with made-up numbers, and prints what they return.
//
//     operations LIBRARY
//
// Each line is the name of an operation, its element type and its results. Built for two machines,
// with the library for each, the program must print nearly the same twice: the numbers are made by
// the same generator, and vectors of both libraries have four lanes.

#include <dlfcn.h>
#include <omp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

void* library;

template <class Result, class... Arguments>
Result call(const char* name, Arguments... arguments) {
  void* found = dlsym(library, (std::string("orcinus_") + name).c_str());
  if (found == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  return reinterpret_cast<Result (*)(Arguments...)>(found)(arguments...);
}

float number() {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
}

// Numbers of float32, or of bfloat16, which is the upper half of a float32.
struct Numbers {
  int64_t element;
  std::vector<char> bytes;

  explicit Numbers(int64_t of, int64_t n) : element(of), bytes(n * size()) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = number();
      std::memcpy(&bytes[i * size()], reinterpret_cast<const char*>(&x) + 4 - size(), size());
    }
  }
  int64_t size() const { return element == 0 ? 4 : 2; }
  void* data() { return bytes.data(); }

  void print(const char* name) const {
    std::printf("%s %s", name, element == 0 ? "float32" : "bfloat16");
    for (size_t at = 0; at < bytes.size(); at += size()) {
      float x = 0;
      std::memcpy(reinterpret_cast<char*>(&x) + 4 - size(), &bytes[at], size());
      std::printf(" %.7g", x);
    }
    std::printf("\n");
  }
};

void print_whole(const char* name, const std::vector<int64_t>& numbers) {
  std::printf("%s whole", name);
  for (int64_t x : numbers) std::printf(" %lld", static_cast<long long>(x));
  std::printf("\n");
}

const void* const kNothing = nullptr;
const int64_t kTokens = 7, kIn = 64, kOut = 21;

void norms(int64_t element) {
  Numbers x(element, kTokens * kIn), weight(element, kIn), bias(element, kIn), out = x;
  call<void>("rms_norm", element, x.data(), element, weight.data(), out.data(), kTokens, kIn,
             int64_t{1}, kIn, 1e-5f);
  out.print("rms_norm");
  call<void>("layer_norm", element, x.data(), element, weight.data(), bias.data(), out.data(),
             kTokens, kIn, int64_t{1}, kIn, 1e-5f);
  out.print("layer_norm");
}

void activations(int64_t element) {
  Numbers x(element, kTokens * 2 * kIn), out(element, kTokens * kIn);
  call<void>("silu_and_mul", element, x.data(), out.data(), kTokens, kIn);
  out.print("silu_and_mul");
  call<void>("gelu_tanh", element, x.data(), out.data(), kTokens, kIn);
  out.print("gelu_tanh");
  Numbers capped(0, kTokens * kIn);
  call<void>("soft_cap", element, x.data(), capped.data(), kTokens, kIn, 0.5f);
  capped.print("soft_cap");
}

void products(int64_t element, int64_t panel) {
  const int64_t n_padded = (kOut + panel - 1) / panel * panel;
  Numbers weights(element, n_padded * kIn), bias(element, n_padded);
  for (int64_t n_tokens : {int64_t{1}, kTokens}) {
    Numbers x(element, n_tokens * kIn), out(element, n_tokens * kOut);
    const int64_t status =
        call<int64_t>("linear", element, x.data(), weights.data(), bias.data(), kNothing,
                      out.data(), n_tokens, kIn, kOut, int64_t{0});
    if (status < 0) std::exit(1);
    out.print("linear");
  }
}

struct Groups {
  int64_t bits, size, scale_bytes, has_offsets, rounds_inputs;
  int8_t values[16];
};

void quantised_products(int64_t element, int64_t panel, int64_t bits, int64_t rounds_inputs) {
  Groups groups{bits, 32, 4, 0, rounds_inputs, {}};
  for (int i = 0; i < 16; ++i) groups.values[i] = static_cast<int8_t>(i - 8);
  const int64_t n_panels = (kOut + panel - 1) / panel, n_words = 32 * bits / 32 * panel;
  std::vector<char> weights;
  const auto append = [&](const void* from, size_t n) {
    weights.insert(weights.end(), static_cast<const char*>(from),
                   static_cast<const char*>(from) + n);
  };
  for (int64_t group = 0; group < n_panels * kIn / 32; ++group) {
    Numbers scales(0, panel);
    append(scales.data(), panel * 4);
    for (int64_t i = 0; i < n_words; ++i) {
      uint32_t word = 0;
      for (int j = 0; j < 4; ++j) word = word << 8 | (static_cast<int>(number() * 127) & 0xff);
      append(&word, 4);
    }
  }
  Numbers x(element, kTokens * kIn), out(element, kTokens * kOut);
  const int64_t status =
      call<int64_t>("linear_groups", element, x.data(), (const void*)weights.data(),
                    (const void*)&groups, kNothing, kNothing, out.data(), kTokens, kIn, kOut,
                    int64_t{0});
  if (status < 0) std::exit(1);
  out.print(rounds_inputs ? "linear_rounded" : bits == 4 ? "linear_4_bits" : "linear_8_bits");
}

// A span of 70 tokens from its beginning, and one that decodes its 90th token.
void attention(int64_t element) {
  const int64_t n_kv_heads = 2, group_size = 2, head_dim = 32, block_size = 16, n_columns = 6;
  const int64_t n_tokens = 71, width = n_kv_heads * group_size * head_dim;
  const int64_t n_blocks = 2 * n_columns, n_kept = n_blocks * block_size * n_kv_heads * head_dim;
  Numbers queries(element, n_tokens * width), keys(element, n_kept), values(element, n_kept);
  Numbers out(element, n_tokens * width);
  std::vector<int64_t> starts{0, 89}, lengths{70, 1}, blocks;
  for (int64_t i = 0; i < n_blocks; ++i) blocks.push_back(i * 5 % n_blocks);
  const int64_t status = call<int64_t>(
      "attention", element, (const void*)queries.data(), width, (const void*)keys.data(),
      (const void*)values.data(), out.data(), (const int64_t*)starts.data(),
      (const int64_t*)lengths.data(), (const int64_t*)blocks.data(), int64_t{2}, n_columns,
      n_kv_heads, group_size, head_dim, head_dim, block_size, int64_t{0}, 0.2f, 0.0f,
      (const float*)nullptr, int64_t{1});
  if (status < 0) std::exit(1);
  out.print("attention");
}

void argmax(int64_t element) {
  Numbers logits(element, kTokens * 1000);
  std::vector<int64_t> tokens(kTokens);
  call<void>("greedy", element, (const void*)logits.data(), int64_t{1000}, kTokens, int64_t{1000},
             tokens.data());
  print_whole("greedy", tokens);
}

}  // namespace

int main(int, char** arguments) {
  omp_set_num_threads(2);
  library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const int64_t panel = call<int64_t>("linear_panel");
  print_whole("linear_panel", {panel});
  for (int64_t element : {0, 1}) {
    norms(element);
    activations(element);
    products(element, panel);
    quantised_products(element, panel, 4, 0);
    quantised_products(element, panel, 4, 1);
    quantised_products(element, panel, 8, 0);
    attention(element);
    argmax(element);
  }
}
