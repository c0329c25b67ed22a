"""The gate of GeGLU on a GPU: everything is read once and written once.

6 * size bytes per token in bfloat16, where one kernel for the gate and one for the product would
move 10 * size; about ten operations per element, in float32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.gates import gelu

_BLOCK = 1024  # elements of a program: with four warps 16 bytes for each thread


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
    """Implements `Ops.gelu_and_mul`."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    n_tokens, width = gate_up.shape
    size = width // 2
    out = torch.empty((n_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    _gelu_and_mul[(n_tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )
    return out
