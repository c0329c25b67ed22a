"""The calls of operations that work token by token, with the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.forms.head_norms import HeadNorms
from kernels.triton.embedding import embedding
from kernels.triton.gates import gelu_and_mul, silu_and_mul
from kernels.triton.greedy import greedy
from kernels.triton.norms import layer_norm, rms_norm
from kernels.triton.rotary import rotary, rotary_write_kv, write_kv
from tests.kernels.triton.compile_only import Cases

# What compiles differently: the sizes and the element type, but not the number of tokens.
N_TOKENS = 3


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def norms(size: int, dtype: torch.dtype) -> None:
    x, weight = empty(N_TOKENS, size, dtype=dtype), empty(size, dtype=dtype)
    rms_norm(x, weight, 1e-5)
    rms_norm(x, weight.float(), 1e-5)
    layer_norm(x, weight, weight, 1e-5)


def norm_of_heads(n_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    heads = empty(N_TOKENS, n_heads + 16, head_dim, dtype=dtype)
    rms_norm(heads[:, :n_heads], empty(head_dim, dtype=dtype), 1e-6)


def gates(size: int, dtype: torch.dtype) -> None:
    silu_and_mul(empty(N_TOKENS, 2 * size, dtype=dtype))
    gelu_and_mul(empty(N_TOKENS, 2 * size, dtype=dtype))


def heads(n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = empty(N_TOKENS, n_heads + 2 * n_kv_heads, head_dim, dtype=dtype)
    k, v = qkv[:, n_heads:-n_kv_heads], qkv[:, -n_kv_heads:]
    angles = empty(N_TOKENS, 1, head_dim, dtype=dtype)
    cache = empty(5, 16, n_kv_heads, head_dim, dtype=dtype)
    slots = torch.zeros(N_TOKENS, dtype=torch.int64)
    rotary(qkv[:, :n_heads], angles, angles)
    write_kv(k, v, cache, cache, slots)
    rotary_write_kv(qkv.flatten(1), angles, angles, cache, cache, slots, n_heads)
    for weight_dtype in (dtype, torch.float32):
        weight = empty(head_dim, dtype=weight_dtype)
        norms = HeadNorms(weight, weight, 1e-6)
        rotary_write_kv(qkv.flatten(1), angles, angles, cache, cache, slots, n_heads, norms)


def rows(n_rows: int, size: int, dtype: torch.dtype) -> None:
    token_ids = torch.zeros(N_TOKENS, dtype=torch.int64)
    embedding(empty(n_rows, size, dtype=dtype), token_ids, n_rows)


def most_likely(vocab_size: int, dtype: torch.dtype) -> None:
    greedy(empty(N_TOKENS, vocab_size, dtype=dtype))


_CALLS: tuple[tuple[str, Callable[..., None], tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
    ("norms of 16384", norms, (16384,), (torch.bfloat16, torch.float32)),
    ("norms of 4096", norms, (4096,), (torch.bfloat16,)),
    ("norms of 576", norms, (576,), (torch.float16,)),
    ("norms of heads of 128", norm_of_heads, (32, 128), (torch.bfloat16,)),
    ("gates of 14336", gates, (14336,), (torch.bfloat16, torch.float32)),
    ("heads of Llama", heads, (32, 8, 128), (torch.bfloat16, torch.float32)),
    ("heads of SmolLM", heads, (9, 3, 64), (torch.float16,)),
    ("heads of Gemma", heads, (8, 4, 256), (torch.bfloat16,)),
    ("heads of 80", heads, (32, 32, 80), (torch.bfloat16,)),
    ("rows of Llama", rows, (16032, 4096), (torch.bfloat16, torch.float32)),
    ("logits of Llama", most_likely, (128256,), (torch.bfloat16, torch.float32)),
    ("few logits", most_likely, (5000,), (torch.bfloat16,)),
)

CASES: Cases = {
    f"{name}, {dtype}": partial(call, *sizes, dtype=dtype)
    for name, call, sizes, dtypes in _CALLS
    for dtype in dtypes
}
