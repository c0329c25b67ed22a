"""Steps of gated MLPs and of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.forms.experts import StackedExperts
from kernels.forms.routing import RoutingForm
from kernels.steps.buffer import Buffer
from kernels.steps.rows import Matrix
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.linear import Clamp, Gate, LinearWeight

GATES = ("silu", "gelu_tanh", "clamp")


@dataclass(frozen=True, slots=True)
class GateForm:
    """The function of a gate: its index in `GATES` and, for a `Clamp`, the slope and the limit."""

    function: int  # index of `GATES`
    slope: float = 0.0
    limit: float = 0.0

    @classmethod
    def of(cls, gate: Gate | Clamp) -> GateForm:
        """Returns the form of the gate function `gate`."""
        if isinstance(gate, Clamp):
            return cls(GATES.index("clamp"), gate.slope, gate.limit)
        return cls(GATES.index(gate))


@dataclass(frozen=True, slots=True)
class ApplyGate:
    """A step that applies the gate function `form` to each row of `x`. The first half of the row is
    the gate, and the second half has the values that the gate multiplies."""

    x: Buffer
    form: GateForm
    out: Buffer


@dataclass(frozen=True, slots=True)
class Gated:
    """The gate and up matrices of a gated MLP, and the gate function that is applied after the
    product, unless the product itself applies the gate."""

    weight: Matrix
    bias: Tensor | None
    form: GateForm | None  # None: the product with the matrix applies the gate

    @classmethod
    def of(cls, weight: GatedMatrix) -> Gated:
        """Returns the step's description of a gated matrix. The description has no gate function if
        the product itself applies the gate."""
        if isinstance(weight, GatedInTwo):
            return cls(weight.weight, weight.bias, GateForm.of(weight.gate))
        return cls(weight, None, None)


@dataclass(frozen=True, slots=True)
class Expert:
    """The packed matrices and biases of one expert's gated MLP."""

    gate_up: Gated
    down: LinearWeight
    down_bias: Tensor | None


ExpertMatrices = Sequence[Expert] | StackedExperts
"""All experts of a layer: separate matrices on a CPU with the native library, otherwise stacked
tensors."""


@dataclass(frozen=True, slots=True)
class Route:
    """A step that chooses experts by their scores (`Ops.route`)."""

    scores: Buffer
    normalises: int
    experts: Buffer
    weights: Buffer


@dataclass(frozen=True, slots=True)
class RouteInGroups:
    """A step that chooses groups of experts, then experts in these groups
    (`Ops.route_in_groups`)."""

    logits: Buffer  # float32
    form: RoutingForm
    experts: Buffer
    weights: Buffer


@dataclass(frozen=True, slots=True)
class RunExperts:
    """A step that computes the weighted sum of the chosen experts' outputs, one expert after the
    other."""

    x: Buffer
    experts: Buffer
    weights: Buffer
    each: Sequence[Expert]
    gathered: Buffer  # scratch memory for the inputs of the tokens of one expert
    both: Buffer  # scratch memory for the gate and up products of these tokens
    inner: Buffer  # scratch memory for the gated products of these tokens
    outer: Buffer  # scratch memory for the expert's outputs for these tokens
    sums: Buffer  # scratch memory for the weighted sums of all tokens, float32
    out: Buffer


@dataclass(frozen=True, slots=True)
class RunStackedExperts:
    """A step that computes the weighted sum of the chosen experts' outputs from stacked matrices
    (`Ops.expert_mlp`)."""

    x: Buffer
    experts: Buffer
    weights: Buffer
    stacked: StackedExperts
    out: Buffer
