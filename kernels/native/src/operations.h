// The operations that a stage is made of; the file that defines an operation says what it computes.
// Those that allocate memory return a status, see `memory.h`.

#pragma once

#include <cstdint>

#include "layout.h"
#include "memory.h"

namespace orcinus {

// The function that the sums of a product go through before they are stored.
enum class Finish : int64_t { kNone, kSilu, kGeluTanh };

}  // namespace orcinus

extern "C" {

void orcinus_rms_norm(int64_t element, const void* x, int64_t weight_element, const void* weight,
                      void* out, int64_t n_outer, int64_t outer_stride, int64_t n_inner,
                      int64_t size, float eps);

int64_t orcinus_linear_panel();

orcinus::Status orcinus_linear(int64_t element, const void* x, const void* weights,
                               const void* bias, const void* residual, void* out, int64_t n_tokens,
                               int64_t n_in, int64_t n_out, int64_t finish);

orcinus::Status orcinus_linear_int8(int64_t element, const void* x, const void* weights,
                                    const void* starts, const void* scales, const void* bias,
                                    const void* residual, void* out, int64_t n_tokens, int64_t n_in,
                                    int64_t n_out, int64_t finish);

orcinus::Status orcinus_linear_groups(int64_t element, const void* x, const void* weights,
                                      const void* groups, const void* bias, const void* residual,
                                      void* out, int64_t n_tokens, int64_t n_in, int64_t n_out,
                                      int64_t finish);

void orcinus_rotary(int64_t element, const void* x, int64_t token_stride, int64_t head_stride,
                    const void* cos, const void* sin, void* out, int64_t out_token_stride,
                    int64_t out_head_stride, int64_t n_tokens, int64_t n_heads, int64_t head_dim);

void orcinus_heads(int64_t element, const void* x, int64_t token_stride, int64_t head_stride,
                   const void* weights, void* out, int64_t out_token_stride,
                   int64_t out_head_stride, int64_t n_tokens, int64_t n_heads, int64_t n_in,
                   int64_t n_out);

orcinus::Status orcinus_delta_net(int64_t element, const void* projected, void* inputs,
                                  float* states, const int64_t* first_tokens,
                                  const int64_t* n_tokens, const int64_t* rows,
                                  const int64_t* start_positions, void* out, int64_t n_spans,
                                  int64_t n_key_heads, int64_t n_value_heads, int64_t key_dim,
                                  int64_t value_dim, int64_t kernel_size, const float* conv,
                                  const float* decay_rate, const float* step_bias,
                                  const float* norm, float eps, float length_eps);

void orcinus_rotary_write_kv(int64_t element, void* qkv, const void* cos, const void* sin, void* keys,
                             void* values, const int64_t* slots, int64_t n_tokens, int64_t n_heads,
                             int64_t n_kv_heads, int64_t head_dim, int64_t weight_element,
                             const void* q_weight, const void* k_weight, float eps);

orcinus::Status orcinus_attention(int64_t element, const void* queries, int64_t query_stride,
                                  const void* keys, const void* values, void* out,
                                  const int64_t* starts, const int64_t* n_tokens,
                                  const int64_t* blocks, int64_t n_spans, int64_t n_columns,
                                  int64_t n_kv_heads, int64_t group_size, int64_t head_dim,
                                  int64_t value_dim, int64_t block_size, int64_t window,
                                  float scale, float soft_cap, const float* sinks,
                                  int64_t is_causal);

void orcinus_layer_norm(int64_t element, const void* x, int64_t weight_element, const void* weight,
                        const void* bias, void* out, int64_t n_outer, int64_t outer_stride,
                        int64_t n_inner, int64_t size, float eps);

void orcinus_write_kv(const char* k, int64_t k_stride, const char* v, int64_t v_stride, char* keys,
                      char* values, const int64_t* slots, int64_t n_tokens, int64_t size);

void orcinus_relu(int64_t element, void* x, int64_t n_tokens, int64_t size);

void orcinus_gelu(int64_t element, const void* x, void* out, int64_t n_tokens, int64_t size);

void orcinus_gelu_tanh(int64_t element, const void* x, void* out, int64_t n_tokens, int64_t size);

void orcinus_silu_and_mul(int64_t element, const void* gate_up, void* out, int64_t n_tokens,
                          int64_t size);

void orcinus_gelu_and_mul(int64_t element, const void* gate_up, void* out, int64_t n_tokens,
                          int64_t size);

void orcinus_clamp_and_mul(int64_t element, const void* gate_up, void* out, int64_t n_tokens,
                           int64_t size, float slope, float limit);

void orcinus_scale(int64_t element, void* x, int64_t n_tokens, int64_t size, float factor);

void orcinus_add_scaled(int64_t element, void* x, const void* y, int64_t n_tokens, int64_t size,
                        float factor);

void orcinus_soft_cap(int64_t element, const void* x, void* out, int64_t n_tokens, int64_t size,
                      float cap);

void orcinus_sigmoid_and_mul(int64_t element, const void* gate, int64_t stride, int64_t gate_size,
                             const void* x, void* out, int64_t n_tokens, int64_t size);

void orcinus_route(int64_t element, const void* scores, int64_t* experts, float* weights,
                   int64_t n_tokens, int64_t n_experts, int64_t n_chosen, int64_t normalises);

orcinus::Status orcinus_route_in_groups(const float* logits, const float* bias, int64_t* experts,
                                        float* weights, int64_t n_tokens, int64_t n_experts,
                                        int64_t n_chosen, int64_t is_softmax, int64_t normalises,
                                        float factor, int64_t n_groups, int64_t n_chosen_groups,
                                        int64_t n_best);

void orcinus_greedy(int64_t element, const void* logits, int64_t stride, int64_t n_rows,
                    int64_t size, int64_t* tokens);
}
