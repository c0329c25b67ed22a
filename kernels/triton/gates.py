"""The gates of gated MLPs, and separate sigmoid gates, on a GPU, each in one launch.

Each element is read and written once. The gate of a gated MLP moves 6 * size bytes per token in
bfloat16; two kernels, one for the gate and one for the product, would move 10 * size. About ten
operations per element are computed in float32, and the result is rounded once. A separate gate
moves 6 bytes per element, or 4 if a token has one gate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.activations import gelu, sigmoid, silu

_BLOCK = 1024  # elements of a program: 16 bytes for each thread of four warps


@triton.jit
def _silu_and_mul(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < SIZE
    gates = gate_up + row * row_stride
    gate = tl.load(gates + column, is_there, 0.0).to(tl.float32)
    up = tl.load(gates + SIZE + column, is_there, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, silu(gate) * up, is_there)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`, as `Ops.silu_and_mul` describes."""
    return _gated(_silu_and_mul, gate_up)


@triton.jit
def _gelu_and_mul(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < SIZE
    gates = gate_up + row * row_stride
    gate = tl.load(gates + column, is_there, 0.0).to(tl.float32)
    up = tl.load(gates + SIZE + column, is_there, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gelu(gate) * up, is_there)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `gelu_tanh(gate) * up`, as `Ops.gelu_and_mul` describes."""
    return _gated(_gelu_and_mul, gate_up)


def _gated(kernel: Any, gate_up: Tensor) -> Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    n_tokens, width = gate_up.shape
    size = width // 2
    out = torch.empty((n_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    kernel[(n_tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )
    return out


@triton.jit
def _sigmoid_and_mul(
    gates, x, out, gate_stride, GATE_SIZE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < SIZE
    place = tl.minimum(column, GATE_SIZE - 1)
    gate = tl.load(gates + row * gate_stride + place, is_there, 0.0).to(tl.float32)
    gated = tl.load(x + row * SIZE + column, is_there, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, sigmoid(gate) * gated, is_there)


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Returns `sigmoid(gate) * x`, as `Ops.sigmoid_and_mul` describes."""
    if gate.stride(1) != 1:
        gate = gate.contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    n_tokens, size = x.shape
    _sigmoid_and_mul[(n_tokens, triton.cdiv(size, _BLOCK))](
        gate,
        x,
        out,
        gate.stride(0),
        GATE_SIZE=gate.shape[1],
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
