"""The calls of Gated DeltaNet, with the shapes of Qwen3-Next and smaller ones."""

from __future__ import annotations

from functools import partial

import torch

from kernels import DeltaNetForm, StateSpans
from kernels.triton.delta_net import delta_net
from kernels.triton.gates import sigmoid_and_mul
from tests.kernels.triton.compile_only import Cases


def states(n_key_heads: int, n_value_heads: int, dim: int, *, dtype: torch.dtype) -> None:
    n_channels = (2 * n_key_heads + n_value_heads) * dim
    form = DeltaNetForm(
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=dim,
        value_dim=dim,
        conv=torch.empty(4, n_channels),
        decay_rate=torch.empty(n_value_heads),
        step_bias=torch.empty(n_value_heads),
        norm=torch.empty(dim),
        eps=1e-6,
    )
    columns = [torch.zeros(3, dtype=torch.int64) for _ in range(4)]
    width = n_channels + n_value_heads * (dim + 2)
    delta_net(
        torch.empty(3, width, dtype=dtype),
        torch.empty(5, 3, n_channels, dtype=dtype),
        torch.empty(5, n_value_heads, dim, dim),
        StateSpans(*columns),
        form,
    )


def gates(gate_size: int, size: int, *, dtype: torch.dtype) -> None:
    sigmoid_and_mul(torch.empty(3, gate_size, dtype=dtype), torch.empty(3, size, dtype=dtype))


CASES: Cases = {
    f"{name}, {dtype}": partial(call, *sizes, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
    for name, call, sizes in (
        ("states of Qwen3-Next", states, (16, 32, 128)),
        ("small states", states, (2, 2, 40)),
        ("gates of attention", gates, (4096, 4096)),
        ("gates of tokens", gates, (1, 2048)),
    )
}
