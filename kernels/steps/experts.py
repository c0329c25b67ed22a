"""Gates, and the mixtures of experts that have them."""

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
    """The function of a gate: the number of one of `GATES`, and the numbers of a `Clamp`."""

    function: int
    slope: float = 0.0
    limit: float = 0.0

    @classmethod
    def of(cls, gate: Gate | Clamp) -> GateForm:
        """Returns the form of a gate."""
        if isinstance(gate, Clamp):
            return cls(GATES.index("clamp"), gate.slope, gate.limit)
        return cls(GATES.index(gate))


@dataclass(frozen=True, slots=True)
class ApplyGate:
    """Gates one half by the other: gates and what they gate lie side by side."""

    x: Buffer
    form: GateForm
    out: Buffer


@dataclass(frozen=True, slots=True)
class Gated:
    """The first half of a gated MLP."""

    weight: Matrix
    bias: Tensor | None
    form: GateForm | None  # None: the matrix gates by itself

    @classmethod
    def of(cls, weight: GatedMatrix) -> Gated:
        """Returns the description of a matrix, and of what gates after it."""
        if isinstance(weight, GatedInTwo):
            return cls(weight.weight, weight.bias, GateForm.of(weight.gate))
        return cls(weight, None, None)


@dataclass(frozen=True, slots=True)
class Expert:
    """The gated MLP of one expert."""

    gate_up: Gated
    down: LinearWeight
    down_bias: Tensor | None


ExpertMatrices = Sequence[Expert] | StackedExperts
"""All experts of a layer, as they are computed fastest where they lie."""


@dataclass(frozen=True, slots=True)
class Route:
    """Computes `Ops.route`."""

    scores: Buffer
    normalises: int
    experts: Buffer
    weights: Buffer


@dataclass(frozen=True, slots=True)
class RouteInGroups:
    """Computes `Ops.route_in_groups`."""

    logits: Buffer  # float32
    form: RoutingForm
    experts: Buffer
    weights: Buffer


@dataclass(frozen=True, slots=True)
class RunExperts:
    """Computes the weighted sum of the chosen experts, expert by expert."""

    x: Buffer
    experts: Buffer
    weights: Buffer
    each: Sequence[Expert]
    gathered: Buffer  # memory for the tokens of one expert, as the next three
    both: Buffer
    inner: Buffer
    outer: Buffer
    sums: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class RunStackedExperts:
    """Computes `Ops.expert_mlp`, the weighted sum of the chosen experts."""

    x: Buffer
    experts: Buffer
    weights: Buffer
    stacked: StackedExperts
    out: Buffer
