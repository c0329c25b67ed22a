"""The calls of products with weights in groups, with the shapes of real models."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.triton.linear_groups import (
    PackedGroups,
    TritonGroupsGatedWeight,
    TritonGroupsWeight,
)
from kernels.weights.groups import Bits, GroupForm
from tests.kernels.triton.compile_only import Cases


def matrix(n_out: int, n_in: int, bits: Bits, size: int) -> PackedGroups:
    """No memory that is touched: all of it is one number."""
    form = GroupForm(bits, size)
    numbers = torch.empty(1, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.empty(1, dtype=torch.float16).expand(n_out, form.n_groups(n_in))
    return PackedGroups(
        numbers.expand(n_out, n_in * bits // 8),
        scales,
        scales if size == 32 else None,
        torch.empty(16, dtype=torch.int8),
        torch.empty(1, dtype=torch.int32),
        form,
        (n_out, n_in),
    )


def added(n_tokens: int, n_out: int, n_in: int, bits: Bits, size: int) -> Tensor:
    """With bias and residual."""
    dtype = torch.bfloat16
    x, residual = (torch.empty(n_tokens, n, dtype=dtype) for n in (n_in, n_out))
    weight = TritonGroupsWeight(matrix(n_out, n_in, bits, size), dtype)
    return weight(x, torch.empty(n_out, dtype=dtype), residual)


def gated(n_tokens: int, n_out: int, n_in: int, bits: Bits, size: int) -> Tensor:
    x = torch.empty(n_tokens, n_in, dtype=torch.bfloat16)
    return TritonGroupsGatedWeight(matrix(2 * n_out, n_in, bits, size), gate=1)(x)


# GPTQ's and AWQ's usual groups, Q4_K's with minimums, and Q8_0's.
FORMS: tuple[tuple[Bits, int], ...] = ((4, 128), (4, 32), (8, 32))

# Of Llama-3-8B.
CASES: Cases = {
    f"{bits} bits in groups of {size} {name}, {n_tokens} tokens": partial(
        call, n_tokens, *sizes, bits, size
    )
    for bits, size in FORMS
    for name, call, sizes in (("down", added, (4096, 14336)), ("gate and up", gated, (14336, 4096)))
    for n_tokens in (1, 300)
}
