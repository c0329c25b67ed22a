"""The gate of a gated MLP with GeLU (GeGLU; Shazeer, 2020), in its tanh approximation."""

import torch.nn.functional as F
from torch import Tensor


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `gelu(gate) * up`, [n_tokens, size], for the two side by side in `gate_up`."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)  # [n_tokens, size]
