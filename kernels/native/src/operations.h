// The operations that a stage is made of; the file that defines an operation says what it computes.
// Those that allocate memory return a status, see `memory.h`.

#pragma once

#include <cstdint>

extern "C" {

void orcinus_rms_norm(int64_t element, const void* x, int64_t weight_element, const void* weight,
                      void* out, int64_t n_outer, int64_t outer_stride, int64_t n_inner,
                      int64_t size, float eps);

int64_t orcinus_linear(int64_t element, const void* x, const void* weights, const void* bias,
                       const void* residual, void* out, int64_t n_tokens, int64_t n_in,
                       int64_t n_out, int64_t finish);

int64_t orcinus_linear_int8(int64_t element, const void* x, const void* weights, const void* starts,
                         const void* scales, const void* bias, const void* residual, void* out,
                         int64_t n_tokens, int64_t n_in, int64_t n_out, int64_t finish);

int64_t orcinus_linear_groups(int64_t element, const void* x, const void* weights,
                              const void* groups, const void* bias, const void* residual, void* out,
                              int64_t n_tokens, int64_t n_in, int64_t n_out, int64_t finish);

void orcinus_rotary_write_kv(int64_t element, void* qkv, const void* cos, const void* sin, void* keys,
                             void* values, const int64_t* slots, int64_t n_tokens, int64_t n_heads,
                             int64_t n_kv_heads, int64_t head_dim, int64_t weight_element,
                             const void* q_weight, const void* k_weight, float eps);

int64_t orcinus_attention(int64_t element, const void* queries, int64_t query_stride, const void* keys,
                       const void* values, void* out, const int64_t* starts,
                       const int64_t* n_tokens, const int64_t* blocks, int64_t n_spans,
                       int64_t n_columns, int64_t n_kv_heads, int64_t group_size, int64_t head_dim,
                       int64_t block_size, int64_t window, float scale, float soft_cap,
                       const float* sinks);

void orcinus_greedy(int64_t element, const void* logits, int64_t stride, int64_t n_rows,
                    int64_t size, int64_t* tokens);
}
