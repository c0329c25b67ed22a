"""The calls of penalties, with the vocabulary of a real model."""

from __future__ import annotations

from functools import partial

import torch

from kernels.forms.sampling_columns import Penalties
from kernels.triton.penalize import penalize
from tests.kernels.triton.compile_only import Cases

N_ROWS = 3


def any_rows(vocab_size: int, dtype: torch.dtype) -> None:
    penalties = Penalties(
        rows=torch.arange(N_ROWS),
        repetition=torch.ones(N_ROWS),
        frequency=torch.zeros(N_ROWS),
        presence=torch.zeros(N_ROWS),
        count_rows=torch.arange(N_ROWS),
        counts=torch.zeros(N_ROWS, vocab_size, dtype=torch.int32),
    )
    penalize(torch.empty(N_ROWS, vocab_size, dtype=dtype), penalties)


CASES: Cases = {
    f"penalize {vocab_size}, {dtype}": partial(any_rows, vocab_size, dtype)
    for vocab_size, dtype in ((128256, torch.bfloat16), (50257, torch.float32))
}
