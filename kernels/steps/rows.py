"""Steps that compute each row by itself: norms, products, and what is done to every element."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.linear_weight import GatedWeight, LinearWeight
from kernels.steps.buffer import Buffer

Matrix = LinearWeight | GatedWeight
ACTIVATIONS = ("relu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Computes `kernels.rms_norm`."""

    x: Buffer
    weight: Tensor
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class RMSNormPart:
    """Computes `kernels.rms_norm` of some neighbouring elements of each row, in place."""

    x: Buffer
    first: int
    size: int
    weight: Tensor  # [size]
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Computes `kernels.layer_norm`."""

    x: Buffer
    weight: Tensor
    bias: Tensor
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiplies with a matrix, and may gate, or add a bias and a residual."""

    x: Buffer
    weight: Matrix
    bias: Tensor | None
    residual: Buffer | None
    out: Buffer


@dataclass(frozen=True, slots=True)
class Activate:
    """Applies a function to every element, in place."""

    x: Buffer
    function: int  # the number of one of `ACTIVATIONS`


@dataclass(frozen=True, slots=True)
class Add:
    """Computes `kernels.add_scaled`, in place."""

    x: Buffer
    y: Buffer
    factor: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplies every element by a factor, in place."""

    x: Buffer
    factor: float


@dataclass(frozen=True, slots=True)
class SoftCap:
    """Computes `kernels.soft_cap`."""

    x: Buffer
    cap: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class SigmoidAndMul:
    """Computes `kernels.sigmoid_and_mul`, in place."""

    gates: Buffer
    x: Buffer


@dataclass(frozen=True, slots=True)
class Greedy:
    """Finds the argmax of logits."""

    logits: Buffer
