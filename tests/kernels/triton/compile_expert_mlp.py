"""The calls of the mixture of experts, with the shapes of real models."""

from __future__ import annotations

from functools import partial

import torch

from kernels.forms.experts import PLAIN_EXPERTS, ExpertForm
from kernels.triton.expert_mlp import expert_mlp
from kernels.weights.linear import Clamp
from tests.kernels.triton.compile_only import Cases


def call(
    n_tokens: int,
    hidden: int,
    size: int,
    n_experts: int,
    n_chosen: int,
    dtype: torch.dtype,
    form: ExpertForm = PLAIN_EXPERTS,
) -> None:
    """The experts' matrices are no memory that is touched: all share one row."""
    expert_mlp(
        torch.empty(n_tokens, hidden, dtype=dtype),
        torch.empty(1, dtype=dtype).expand(n_experts, 2 * size, hidden),
        torch.empty(1, dtype=dtype).expand(n_experts, hidden, size),
        torch.zeros(n_tokens, n_chosen, dtype=torch.int64),
        torch.zeros(n_tokens, n_chosen),
        form,
    )


def call_clamped(
    n_tokens: int, hidden: int, size: int, n_experts: int, n_chosen: int, dtype: torch.dtype
) -> None:
    """With biases and the clamped gate, as gpt-oss has them."""
    biases = [torch.empty(1, dtype=dtype).expand(n_experts, n) for n in (2 * size, hidden)]
    form = ExpertForm(biases[0], biases[1], Clamp(1.702, 7.0))
    call(n_tokens, hidden, size, n_experts, n_chosen, dtype, form)


def call_gelu(
    n_tokens: int, hidden: int, size: int, n_experts: int, n_chosen: int, dtype: torch.dtype
) -> None:
    """With the gate of Gemma 4."""
    call(n_tokens, hidden, size, n_experts, n_chosen, dtype, ExpertForm(gate="gelu_tanh"))


CASES: Cases = {
    "Gemma 4, 300 tokens": partial(call_gelu, 300, 2816, 704, 128, 8, torch.bfloat16),
    **{
        f"gpt-oss, {n_tokens} tokens": partial(
            call_clamped, n_tokens, 2880, 2880, 32, 4, torch.bfloat16
        )
        for n_tokens in (3, 300, 3000)
    },
    **{
        f"{name}, {n_tokens} tokens, {dtype}": partial(call, n_tokens, *sizes, dtype)
        for name, sizes, dtype in (
            ("Qwen3", (2048, 768, 128, 8), torch.bfloat16),
            ("Mixtral", (4096, 14336, 8, 2), torch.bfloat16),
            # A rank's eighth: less than a step of the second product.
            ("Qwen3 in eight", (2048, 96, 128, 8), torch.float16),
            ("Qwen3", (2048, 768, 128, 8), torch.float32),
        )
        for n_tokens in (3, 300, 3000)
    },
}
