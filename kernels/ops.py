"""The operations that an implementation offers, each with its type.

An operation of a few positional tensors is a `Callable`: its function in `kernels.pytorch` says
what it computes. Operations with more arguments are protocols, described here. The two halves of
attention belong together: a plan is opaque, and only operations of the same `Ops` can read it.

A new operation is a field of `Ops` and a function of the same name in a module of
`kernels.pytorch`, and in one of `kernels.native` or `kernels.triton` where it is worth a kernel:
`Ops.of` finds the functions by the names of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.forms.attention import AttentionForm
from kernels.forms.delta_net import DeltaNetForm
from kernels.forms.experts import ExpertForm
from kernels.forms.head_norms import HeadNorms
from kernels.forms.logits import Logits
from kernels.forms.routing import RoutingForm
from kernels.forms.sampling_columns import SamplingColumns
from kernels.forms.state_spans import StateSpans
from kernels.program import Program
from kernels.upload import Uploads
from kernels.weights.linear import Clamp

Ints = NDArray[np.int64]

LayerKV = tuple[Tensor, Tensor]
"""What one layer stores: keys and values, [n_blocks, block_size, n_kv_heads, head_dim] each; or the
last inputs and the states of a layer without them, as `Ops.delta_net` has them.

Values have no elements where they are a part of the keys."""


class AttentionPlan:
    """The layout of one batch for attention, made once for all layers of an iteration.

    It is opaque: callers pass it from `plan_attention` to `attention` of the same operations, each
    of which derives a plan of its own from this class.
    """

    __slots__ = ()


class PlanAttention(Protocol):
    """Prepares the attention of one mixed batch."""

    def __call__(
        self,
        start_positions: Ints,
        n_tokens: Ints,
        /,
        *,
        block_tables: Ints,
        key_caches: Sequence[Tensor],
        n_heads: int,
        windows: Sequence[int | None] = ...,
        uploads: Uploads,
        has_fixed_shape: bool = ...,
    ) -> AttentionPlan:
        """Returns the plan of a batch, for layers of any of the `windows`.

        Args:
            start_positions: [n_spans], of each span's first token in its sequence.
            n_tokens: [n_spans], tokens of each span.
            block_tables: [n_spans, any width], the blocks of each span's sequence in order; the
                rest are any valid ids.
            key_caches: one layer's keys [n_blocks, block_size, n_kv_heads, head_dim] for each kind
                of K/V heads that layers have; only shapes and types matter.
            n_heads: the query heads of this rank.
            windows: the different windows of the layers (see `AttentionForm`); by default none.
            uploads: takes the plan's tensors; it is to be flushed before `attention` reads them.
            has_fixed_shape: promises that every span is one token, and wants shapes that depend on
                the shape of `block_tables` alone; for operations that have `has_fixed_shapes`.
        """


class ComputeAttention(Protocol):
    """Attends from every token of a batch to the stored tokens of its sequence."""

    def __call__(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionPlan,
        form: AttentionForm = ...,
        sinks: Tensor | None = ...,
        /,
    ) -> Tensor:
        """Returns [n_tokens, n_heads, value_dim] for `q` [n_tokens, n_heads, head_dim].

        The caches [n_blocks, block_size, n_kv_heads, head_dim] are one layer's storage, dense, and
        hold the keys and values of the batch itself. Values that are the first elements of keys are
        passed as such, `key_cache[..., :value_dim]`. The window of `form` must be among those that
        were planned; the default form is the plain formula.

        `sinks` [n_heads] are float32 and dense. A head's sink is a score that joins the softmax of
        each of its queries, whatever the window, and has no value: it only takes weight away.
        """


class RunExpertMLPs(Protocol):
    """Runs the experts of a layer, all of whose matrices it gets."""

    def __call__(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        experts: Tensor,
        weights: Tensor,
        form: ExpertForm = ...,
        /,
    ) -> Tensor:
        """Returns `sum_i weights[t, i] * mlp of experts[t, i] (x[t])` for every token t.

        `x` is [n_tokens, hidden], `experts` (int64, all different for a token) and `weights` are
        [n_tokens, n_chosen]. `gate_up` is [n_experts, 2 * size, hidden], the gate's rows first, and
        `down` [n_experts, hidden, size]. The result is [n_tokens, hidden].
        """


class TurnAndWriteKV(Protocol):
    """Turns queries and keys of a fused projection, and stores keys and values."""

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        n_heads: int,
        norms: HeadNorms | None = ...,
        /,
    ) -> Tensor:
        """Returns turned queries [n_tokens, n_heads, head_dim]; see `Ops.rotary_write_kv`."""


class Ranks(Protocol):
    """The ranks that share a stage, as steps at which they meet need them."""

    def all_reduce(self, tensor: Tensor, /) -> None:
        """Sums `tensor` over all ranks, in place."""

    def all_gather(self, tensor: Tensor, /) -> Tensor:
        """Returns the ranks' tensors side by side along the last dimension, in their order."""


class ProgramBatch(Protocol):
    """A flat batch, as a program takes it."""

    @property
    def positions(self) -> Tensor:
        """Places of tokens in their sequences, [n_tokens] int64."""

    @property
    def slots(self) -> Tensor:
        """Where the keys and values of tokens are stored, [n_tokens] int64."""

    @property
    def attention(self) -> AttentionPlan:
        """The batch's plan, of the same operations."""

    @property
    def states(self) -> StateSpans | None:
        """Where layers keep a state of each request, if any do."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the stage."""

    def of_groups(self) -> Sequence[ProgramBatch]:
        """Returns the batch as the layers of each K/V group have it; plans differ in nothing but
        block tables."""


class ProgramRunner(Protocol):
    """Runs a program. Results are equal to the bit, whichever runner of some operations it is."""

    @property
    def program(self) -> Program:
        """The program that is run."""

    def __call__(self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Returns the hidden states after the last layer, [n_tokens, hidden_size].

        Args:
            inputs: tokens [n_tokens] int64, or the hidden states [n_tokens, hidden_size] that the
                program takes in, which are used up.
            batch: where the tokens are, and how they attend.
            kv: the storage of each layer; if the first tensor is that of the run before, so must
                the others be.

        Raises:
            TypeError: a plan is of other operations.
            ValueError: a tensor has another type or shape, or a layer is of a group that the batch
                does not have.
            IndexError: a token or position is not in the tables.
        """

    def logits(
        self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Returns the logits of sampled tokens, [n_sampled, vocab_size].

        `sampled` [n_sampled] int64 are places in the batch, in order; the other arguments are those
        of a call. The next run may overwrite the result.

        Raises:
            TypeError: a plan is of other operations.
            ValueError: a tensor has another type or shape, or the program has no head.
            IndexError: a token or position is not in the tables, or a place not in the batch.
        """

    def head(self, hidden: Tensor, ranks: Ranks) -> Tensor:
        """Returns the logits [n, vocab_size] of any hidden states [n, hidden_size] after the last
        layer; raises ValueError if the program has no head."""


class RunProgram(Protocol):
    """Prepares a program for running."""

    def __call__(self, program: Program, ops: Ops, /) -> ProgramRunner:
        """Returns what runs the program fastest on `ops`, whose function this is.

        Raises ValueError for tensors that do not fit each other, and TypeError for a step that
        cannot be run.
        """


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operation, for one kind of device."""

    embedding: Callable[[Tensor, Tensor, int], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    clamp_and_mul: Callable[[Tensor, Clamp], Tensor]
    sigmoid_and_mul: Callable[[Tensor, Tensor], Tensor]
    add_scaled: Callable[[Tensor, Tensor, float], Tensor]
    soft_cap: Callable[[Tensor, float], Tensor]
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    route_in_groups: Callable[[Tensor, RoutingForm], tuple[Tensor, Tensor]]
    expert_mlp: RunExpertMLPs
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rotary_write_kv: TurnAndWriteKV
    plan_attention: PlanAttention
    attention: ComputeAttention
    delta_net: Callable[[Tensor, Tensor, Tensor, StateSpans, DeltaNetForm], Tensor]
    greedy: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, SamplingColumns], Tensor]
    run_program: RunProgram
    has_fixed_shapes: bool = False
    """Whether plans can be made whose shapes do not depend on what is in a batch. Then an iteration
    can be recorded as a graph."""

    @classmethod
    def of(cls, *sources: object, otherwise: Ops | None = None, **given: Any) -> Self:
        """Returns the operations that `sources` have under the names of the fields.

        A source is a module, of which the functions that it defines count, or an object with
        methods. Where no source has an operation, `otherwise` has it. Fields that are `given` are
        taken as they are. Raises TypeError for an operation that is nowhere.
        """
        names = [field.name for field in fields(cls)]
        found = {} if otherwise is None else {name: getattr(otherwise, name) for name in names}
        for source in sources:
            offered = _offered(source)
            found.update((name, offered[name]) for name in names if name in offered)
        return cls(**{**found, **given})

    def runner(self, program: Program) -> ProgramRunner:
        """Returns what runs the program on these operations; raises as `RunProgram` does."""
        return self.run_program(program, self)


def _offered(source: object) -> dict[str, Any]:
    """Returns the functions that a module defines, or the methods of an object, by their names."""
    if not isinstance(source, ModuleType):
        return {name: getattr(source, name) for name in dir(source)}
    return {
        name: value
        for name, value in vars(source).items()
        if getattr(value, "__module__", None) == source.__name__
    }
