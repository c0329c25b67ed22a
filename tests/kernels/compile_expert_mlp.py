"""The calls of the mixture of experts, with the shapes of real models."""

from __future__ import annotations

from functools import partial

import torch

from kernels.triton.expert_mlp import expert_mlp
from tests.kernels.compile_only import Cases


def call(
    n_tokens: int, hidden: int, size: int, n_experts: int, n_chosen: int, dtype: torch.dtype
) -> None:
    """The experts' matrices are no memory that is touched: all share one row."""
    expert_mlp(
        torch.empty(n_tokens, hidden, dtype=dtype),
        torch.empty(1, dtype=dtype).expand(n_experts, 2 * size, hidden),
        torch.empty(1, dtype=dtype).expand(n_experts, hidden, size),
        torch.zeros(n_tokens, n_chosen, dtype=torch.int64),
        torch.zeros(n_tokens, n_chosen),
    )


CASES: Cases = {
    f"{name}, {n_tokens} tokens, {dtype}": partial(call, n_tokens, *sizes, dtype)
    for name, sizes, dtype in (
        ("Qwen3", (2048, 768, 128, 8), torch.bfloat16),
        ("Mixtral", (4096, 14336, 8, 2), torch.bfloat16),
        # A rank's eighth: less than a step of the second product.
        ("Qwen3 in eight", (2048, 96, 128, 8), torch.float16),
        ("Qwen3", (2048, 768, 128, 8), torch.float32),
    )
    for n_tokens in (3, 300, 3000)
}
