"""The gate of a gated MLP with clamped inputs, which `kernels.weights.linear.Clamp` describes."""

from torch import Tensor

from kernels.weights.linear import Clamp


def clamp_and_mul(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """Returns the gated half [n_tokens, size] for gates and what they gate side by side.

    It is computed in float32.
    """
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    gated = (up + 1) * gate * (clamp.slope * gate).sigmoid()
    return gated.to(gate_up.dtype)  # [n_tokens, size]
