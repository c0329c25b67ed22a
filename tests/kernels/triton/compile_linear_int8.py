"""The calls of products with int8 weights, with the shapes of real models."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.triton.linear_int8 import Int8Matrix, TritonInt8GatedWeight, TritonInt8Weight
from tests.kernels.triton.compile_only import Cases


def matrix(n_out: int, n_in: int) -> Int8Matrix:
    """No memory that is touched: all of it is one number."""
    scales, arrivals = torch.empty(n_out), torch.empty(1, dtype=torch.int32)
    return Int8Matrix(
        torch.empty(1, dtype=torch.int8).expand(n_out, n_in), scales, arrivals, (n_out, n_in)
    )


def added(n_tokens: int, n_out: int, n_in: int, dtype: torch.dtype) -> Tensor:
    """With bias and residual."""
    x, residual = (torch.empty(n_tokens, size, dtype=dtype) for size in (n_in, n_out))
    return TritonInt8Weight(matrix(n_out, n_in))(x, torch.empty(n_out, dtype=dtype), residual)


def gated(n_tokens: int, n_out: int, n_in: int, dtype: torch.dtype) -> Tensor:
    x = torch.empty(n_tokens, n_in, dtype=dtype)
    return TritonInt8GatedWeight(matrix(2 * n_out, n_in), gate=1)(x)


# Of Llama-3-8B; a rank's eighth of 11,008 inside is no whole number of steps.
CASES: Cases = {
    f"int8 {name}, {n_tokens} tokens, {dtype}": partial(call, n_tokens, *sizes, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for name, call, sizes in (
        ("down", added, (4096, 14336)),
        ("eighth of a down", added, (4096, 1376)),
        ("gate and up", gated, (14336, 4096)),
        ("eighth of gate and up", gated, (1376, 4096)),
    )
    for n_tokens in (1, 20, 50, 300)
    if dtype == torch.bfloat16 or name in ("down", "eighth of gate and up")
}
