"""The gate of a gated MLP with GeLU (GeGLU; Shazeer, 2020), in its tanh approximation."""

import torch.nn.functional as F
from torch import Tensor


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, where `gate_up` [n_tokens, 2 * size] holds the two side by side."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)  # [n_tokens, size]
