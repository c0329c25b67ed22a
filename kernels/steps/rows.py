"""Steps that compute each row by itself: norms, products, and what is done to every element."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.steps.buffer import Buffer
from kernels.weights.linear import GatedWeight, LinearWeight

Matrix = LinearWeight | GatedWeight
ACTIVATIONS = ("relu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Computes `Ops.rms_norm`."""

    x: Buffer
    weight: Tensor
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class RMSNormPart:
    """Computes `Ops.rms_norm` of `n` parts of each row, `size` elements each, which lie side by
    side from the element `first` on; in place."""

    x: Buffer
    first: int
    n: int
    size: int
    weight: Tensor  # [size]
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Computes `Ops.layer_norm`."""

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
    """Computes `Ops.add_scaled`, in place."""

    x: Buffer
    y: Buffer
    factor: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplies every element by a factor, in place."""

    x: Buffer
    factor: float


@dataclass(frozen=True, slots=True)
class ScaleByPosition:
    """Multiplies the first elements of each row by a factor of its token's position, in place."""

    x: Buffer
    size: int  # how many elements
    factors: Tensor  # [n_lengths]
    length: int  # positions that have one factor


@dataclass(frozen=True, slots=True)
class Widen:
    """Converts every element to float32."""

    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class SoftCap:
    """Computes `Ops.soft_cap`."""

    x: Buffer
    cap: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class Mul:
    """Multiplies with the elements of each row of `y` from the element `first` on, in place."""

    x: Buffer
    y: Buffer
    first: int


@dataclass(frozen=True, slots=True)
class SigmoidAndMul:
    """Computes `Ops.sigmoid_and_mul`, in place; gates begin at the element `first` of a row."""

    gates: Buffer
    first: int
    x: Buffer


@dataclass(frozen=True, slots=True)
class Greedy:
    """Finds the argmax of logits."""

    logits: Buffer
