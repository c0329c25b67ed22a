"""A stopwatch in a model: measures the time of each kind of step of the model's program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kernels import Ops
from kernels.native.layers import NativeProgram
from kernels.pytorch.interpreter import Interpreter
from kernels.steps import Expert, Gated, Multiply, RunExperts
from kernels.weights.linear import LinearWeight
from services.worker.models import StageModel

KINDS = {
    "attention": "attention",
    "sample": "sampling",
}  # the kinds of operations; other operations are "other"
UNTIMED = {
    "plan_attention",
    "run_program",
    "has_fixed_shapes",
}  # fields of `Ops` that are not timed
SHARED = ("linear", "attention", "other", "sampling")  # kinds with a share of the time


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds spent in calls, by kind of call. A call inside another call counts as
    part of the outer call."""

    seconds: dict[str, float] = field(default_factory=dict)
    is_inside: bool = False

    def of(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `function` and adds the time of the call to the kind
        `kind`."""

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
    """Returns a copy of `ops` whose operations add the time of each call to `watch`, by the kind of
    the operation."""
    names = {f.name for f in dataclasses.fields(ops)} - UNTIMED
    timed: dict[str, Any] = {
        name: watch.of(KINDS.get(name, "other"), getattr(ops, name)) for name in names
    }
    return dataclasses.replace(ops, **timed)


@dataclass(frozen=True, slots=True)
class TimedWeight:
    """A weight whose matrix products are timed. All other attributes are the attributes of the
    original weight."""

    weight: Any
    call: Callable[..., Tensor]

    def __call__(self, *args: Any) -> Tensor:
        return self.call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight, name)


@dataclass(frozen=True, slots=True)
class Choice:
    """The share of a batch's tokens that are multiplied by a weight. The weight of an expert
    multiplies only the tokens that choose this expert; other weights multiply all tokens."""

    n_experts: int = 1
    n_chosen: int = 1
    expert: int = 0

    def n_tokens(self, n: int) -> int:
        """Returns how many of `n` tokens choose the expert, if the experts are chosen equally
        often."""
        n_of_each, n_left = divmod(n * self.n_chosen, self.n_experts)
        return n_of_each + (self.expert < n_left)


@dataclass(frozen=True, slots=True)
class Use:
    """A weight, and the share of tokens that the weight multiplies."""

    weight: Any
    choice: Choice


def instrument(model: StageModel, watch: Stopwatch) -> list[Use]:
    """Adds timers to the operations and weights of a model. Returns the weights in the order of the
    program, each with its share of the tokens."""
    program = model.runner.program
    model.ops = timed_ops(model.ops, watch)
    uses = [use for step in program.steps for use in _uses(step)]
    if isinstance(model.runner, Interpreter):
        program.steps[:] = [_timed(step, watch) for step in program.steps]
        model.runner = model.ops.runner(program)
    return uses


def seconds_at_once(model: StageModel) -> dict[str, float]:
    """Returns the seconds that native code has spent so far in this model's program, by kind.
    Returns an empty dictionary if the program does not run in native code."""
    if not isinstance(model.runner, NativeProgram):
        return {}
    seconds = model.runner.seconds
    return {kind: getattr(seconds, kind) for kind in SHARED}


def _uses(step: object) -> list[Use]:
    """Returns the weights that a step of the program multiplies by, each with its share of the
    tokens."""
    if isinstance(step, Multiply):
        weights, choices = [step.weight], [Choice()]
    elif isinstance(step, RunExperts):
        weights, choices = [], []
        for i, expert in enumerate(step.each):
            weights += [expert.gate_up.weight, expert.down]
            choices += [Choice(len(step.each), step.experts.width, i)] * 2
    else:
        return []
    both = zip(weights, choices, strict=True)
    return [Use(weight, choice) for weight, choice in both if isinstance(weight, LinearWeight)]


def _timed(step: object, watch: Stopwatch) -> object:
    """Returns a copy of a step in which matrix products are timed. A step of another kind is
    returned unchanged."""

    def timed(weight: Any) -> Any:
        return TimedWeight(weight, watch.of("linear", weight))

    def timed_expert(expert: Expert) -> Expert:
        first = expert.gate_up
        return Expert(
            Gated(timed(first.weight), first.bias, first.form), timed(expert.down), expert.down_bias
        )

    if isinstance(step, Multiply):
        return dataclasses.replace(step, weight=timed(step.weight))
    if isinstance(step, RunExperts):
        return dataclasses.replace(step, each=[timed_expert(each) for each in step.each])
    return step
