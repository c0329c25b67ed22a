"""Steps that compute each row independently: norms, products and elementwise functions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.steps.buffer import Buffer
from kernels.weights.linear import GatedWeight, LinearWeight

Matrix = LinearWeight | GatedWeight
ACTIVATIONS = ("relu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Normalises rows by their root mean square (`Ops.rms_norm`)."""

    x: Buffer
    weight: Tensor
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class RMSNormPart:
    """Normalises `n` parts of each row by their root mean square (`Ops.rms_norm`), in place.

    Each part has `size` elements. The parts are adjacent and begin at the element `first` of a row.
    """

    x: Buffer
    first: int
    n: int
    size: int
    weight: Tensor  # [size]
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Applies layer normalisation to rows (`Ops.layer_norm`)."""

    x: Buffer
    weight: Tensor
    bias: Tensor
    eps: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiplies rows by a matrix.

    If the matrix has a fused gate, the gate is applied to the product. Otherwise a bias and a
    residual may be added.
    """

    x: Buffer
    weight: Matrix
    bias: Tensor | None
    residual: Buffer | None
    out: Buffer


@dataclass(frozen=True, slots=True)
class Activate:
    """Applies a function to every element, in place."""

    x: Buffer
    function: int  # index of `ACTIVATIONS`


@dataclass(frozen=True, slots=True)
class Add:
    """Adds `factor * y` to `x` (`Ops.add_scaled`), in place."""

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
    """Multiplies the first elements of each row by a factor that depends on the token's position,
    in place."""

    x: Buffer
    size: int  # number of elements of each row that are multiplied
    factors: Tensor  # [n_factors], the factor of a position is `factors[position // length]`
    length: int  # number of consecutive positions that share a factor


@dataclass(frozen=True, slots=True)
class Widen:
    """Converts every element to float32."""

    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class SoftCap:
    """Limits elements smoothly to a cap (`Ops.soft_cap`)."""

    x: Buffer
    cap: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class Mul:
    """Multiplies each row of `x` elementwise by a part of the row of `y`, which begins at the
    element `first`, in place."""

    x: Buffer
    y: Buffer
    first: int


@dataclass(frozen=True, slots=True)
class SigmoidAndMul:
    """Multiplies `x` by the sigmoid of gates (`Ops.sigmoid_and_mul`), in place. The gates of a row
    begin at the element `first` of the row of `gates`."""

    gates: Buffer
    first: int
    x: Buffer


@dataclass(frozen=True, slots=True)
class Greedy:
    """Computes the argmax of each row of logits."""

    logits: Buffer
