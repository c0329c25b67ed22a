"""The calls of sampling, with the vocabulary of a real model."""

from __future__ import annotations

from functools import partial

import torch

from kernels.forms.sampling_columns import SamplingColumns
from kernels.triton.sample import sample
from tests.kernels.triton.compile_only import Cases

# What compiles differently: the element type and the vocabulary, but not the number of rows.
N_ROWS = 3


def any_rows(vocab_size: int, dtype: torch.dtype) -> None:
    columns = SamplingColumns(
        temperature=torch.ones(N_ROWS),
        top_k=torch.zeros(N_ROWS, dtype=torch.int64),
        top_p=torch.ones(N_ROWS, dtype=torch.float64),
        min_p=torch.zeros(N_ROWS),
        uniform=torch.zeros(N_ROWS, dtype=torch.float64),
        banned_rows=torch.empty(0, dtype=torch.int64),
        banned_ids=torch.empty(0, dtype=torch.int64),
        any_sampled=True,
        any_limited=True,
        any_min_p=True,
    )
    sample(torch.empty(N_ROWS, vocab_size, dtype=dtype), columns)


CASES: Cases = {
    f"sample of {vocab_size}, {dtype}": partial(any_rows, vocab_size, dtype)
    for vocab_size, dtype in (
        (128256, torch.bfloat16),
        (128256, torch.float16),
        (128256, torch.float32),
        (50257, torch.bfloat16),
    )
}
