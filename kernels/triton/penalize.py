"""Penalties of tokens that have occurred, on a GPU (see `kernels.pytorch.penalize`).

All logits are copied, then one launch changes the rows that are penalised. Each program of the
launch handles a block of a row. It reads the 4-byte count of each token, and reads the logits only
if a token of the block has occurred.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms.sampling_columns import IN_PROMPT, Penalties

_BLOCK = 2048  # number of tokens of a program


@triton.jit
def _penalize(
    logits,
    rows,
    repetitions,
    frequencies,
    presences,
    count_rows,
    counts,
    row_stride,
    SIZE: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < SIZE
    count = tl.load(counts + tl.load(count_rows + program) * SIZE + index, is_there, 0)
    if tl.max(count, 0) > 0:
        places = logits + tl.load(rows + program) * row_stride + index
        value = tl.load(places, is_there, 0.0)
        repetition = tl.load(repetitions + program)
        n_generated = count & (IN_PROMPT - 1)
        repeated = tl.where(value > 0.0, value / repetition, value * repetition)
        value = tl.where(count > 0, repeated, value)
        value -= tl.load(frequencies + program) * n_generated.to(tl.float32)
        value -= tl.where(n_generated > 0, tl.load(presences + program), 0.0)
        tl.store(places, value, is_there)


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """Returns a penalised float32 copy of `logits` [n_rows, vocab_size], as
    `kernels.pytorch.penalize` does. The host does not wait for the device."""
    penalized = logits.to(
        torch.float32, copy=True, memory_format=torch.contiguous_format
    )  # [n_rows, vocab_size]
    size = logits.shape[1]
    _penalize[(len(penalties.rows), triton.cdiv(size, _BLOCK))](
        penalized,
        penalties.rows,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        penalties.count_rows,
        penalties.counts,
        penalized.stride(0),
        SIZE=size,
        IN_PROMPT=IN_PROMPT,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return penalized
