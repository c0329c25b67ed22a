"""The gate of a gated MLP (SwiGLU; Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`, [n_tokens, size], for the two side by side in `gate_up`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)  # [n_tokens, size]
