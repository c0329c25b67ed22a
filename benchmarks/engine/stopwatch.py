"""A stopwatch in a model: the time of its operations and of its linear layers, by kind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kernels import Ops
from kernels.packed_linear import LinearWeight
from services.worker.models import StageModel
from services.worker.models.layer_stack import AllAtOnce
from services.worker.models.mixture import ExpertMixture

KINDS = {"attention": "attention", "sample": "sampling"}  # of operations; all else is "other"
UNTIMED = {"plan_attention", "fuse_layers", "has_fixed_shapes"}  # of the fields of Ops
SHARED = ("linear", "attention", "other", "sampling")  # among which an iteration's time is


@dataclass(slots=True)
class Stopwatch:
    """Adds up the time in calls of each kind; a call inside another counts as part of the outer
    one."""

    seconds: dict[str, float] = field(default_factory=dict)
    is_inside: bool = False

    def of(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, timed as a call of this kind."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside:
                return function(*args, **kwargs)
            self.is_inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.is_inside = False
                spent = time.perf_counter() - start
                self.seconds[kind] = self.seconds.get(kind, 0.0) + spent

        return timed


def timed_ops(ops: Ops, watch: Stopwatch) -> Ops:
    """Returns the operations, each timed by its kind."""
    names = {f.name for f in dataclasses.fields(ops)} - UNTIMED
    timed: dict[str, Any] = {
        name: watch.of(KINDS.get(name, "other"), getattr(ops, name)) for name in names
    }
    return dataclasses.replace(ops, **timed)


@dataclass(frozen=True, slots=True)
class TimedWeight:
    """A weight whose products are timed."""

    weight: Any
    call: Callable[..., Tensor]

    def __call__(self, *args: Any) -> Tensor:
        return self.call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight, name)


@dataclass(frozen=True, slots=True)
class Choice:
    """Fraction of all tokens that go through a weight: the tokens that choose its expert."""

    n_experts: int = 1
    n_chosen: int = 1
    expert: int = 0

    def of(self, expert: int) -> Choice:
        """Returns the choice of one of the experts; of a weight outside experts, this choice."""
        return self if self.n_experts == 1 else dataclasses.replace(self, expert=expert)

    def n_tokens(self, n: int) -> int:
        """Returns the tokens of `n` that choose the expert, if all experts are chosen equally
        often."""
        n_of_each, n_left = divmod(n * self.n_chosen, self.n_experts)
        return n_of_each + (self.expert < n_left)


@dataclass(frozen=True, slots=True)
class Use:
    """A weight, and the tokens by which it is multiplied."""

    weight: Any
    choice: Choice


def instrument(model: StageModel, watch: Stopwatch) -> list[Use]:
    """Times everything that the model computes with; returns the uses of its weights in order."""
    uses: list[Use] = []
    model.ops = timed_ops(model.ops, watch)

    def visited(value: Any, choice: Choice) -> Any:
        if isinstance(value, LinearWeight):
            uses.append(Use(value, choice))
            return TimedWeight(value, watch.of("linear", value))
        if isinstance(value, Ops):
            return model.ops
        if isinstance(value, (list, tuple)):
            return type(value)(visited(item, choice.of(i)) for i, item in enumerate(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            of_experts = choice
            if isinstance(value, ExpertMixture):
                of_experts = Choice(value.router.shape[0], value.n_chosen)
            for one in dataclasses.fields(value):
                of_field = of_experts if one.name == "experts" else choice
                object.__setattr__(value, one.name, visited(getattr(value, one.name), of_field))
        return value

    for name in ("_decoder_layers", "_head"):
        setattr(model, name, visited(getattr(model, name), Choice()))
    return uses


def seconds_at_once(model: StageModel) -> dict[str, float]:
    """Returns the seconds of concurrent layers until now, by kind."""
    layer_stack = getattr(model, "_layer_stack", None)
    if not isinstance(layer_stack, AllAtOnce):
        return {}
    seconds = layer_stack.fused.seconds
    return {kind: getattr(seconds, kind) for kind in SHARED}
