"""The gate of a gated MLP (SwiGLU; Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, where `gate_up` [n_tokens, 2 * size] holds the two side by side."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)  # [n_tokens, size]
