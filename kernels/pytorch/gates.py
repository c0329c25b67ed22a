"""Activations, and the gates of gated MLPs.

Each row of a tensor `gate_up` [n_tokens, 2 * size] holds the elements `gate`, followed by the
elements `up` to which the gate is applied.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.weights.linear import Clamp


def gelu(x: Tensor) -> Tensor:
    """Returns `x * Phi(x)`, in the shape of `x` [n_tokens, size] (GeLU; Hendrycks & Gimpel, 2016).

    `Phi` is the cumulative distribution function of the standard normal distribution.
    """
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns the tanh approximation of GeLU, in the shape of `x` [n_tokens, size]."""
    return F.gelu(x, approximate="tanh")


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`, [n_tokens, size] (SwiGLU; Shazeer, 2020).

    A row of `gate_up` [n_tokens, 2 * size] holds `gate` and then `up`.
    """
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)  # [n_tokens, size]


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns `gelu_tanh(gate) * up`, [n_tokens, size] (GeGLU; Shazeer, 2020).

    A row of `gate_up` [n_tokens, 2 * size] holds `gate` and then `up`.
    """
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)  # [n_tokens, size]


def clamp_and_mul(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """Returns the gate `Clamp` applied to `gate_up`: [n_tokens, size].

    A row of `gate_up` [n_tokens, 2 * size] holds `gate` and then `up`. `Clamp` defines the formula,
    which is computed in float32.
    """
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    gated = (up + 1) * gate * (clamp.slope * gate).sigmoid()
    return gated.to(gate_up.dtype)  # [n_tokens, size]


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Returns `sigmoid(gate) * x`, [n_tokens, size].

    `gate` is [n_tokens, size], or [n_tokens, 1] if each token has one gate for all its elements.
    """
    return gate.float().sigmoid().mul(x.float()).to(x.dtype)
