"""The operations that an implementation offers, each with its type.

The type of an operation with a few positional tensors is a `Callable`, and the function of the same
name in `kernels.pytorch` describes its result. The type of an operation with more arguments is a
protocol in this module. `plan_attention` and `attention` belong together: a plan is opaque, and
only the operations of the `Ops` that made the plan can read it.

To add an operation, add a field to `Ops` and a function of the same name to a module of
`kernels.pytorch`. If it needs a faster kernel, add the function also to a module of
`kernels.native` or `kernels.triton`. `Ops.of` finds the functions by the names of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.forms.adapter_rows import AdapterRows, BatchAdapters
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
"""The storage of one layer: two tensors.

A layer with attention stores keys and values, [n_blocks, block_size, n_kv_heads, head_dim] each.
The tensor of values has no elements if values are a part of the keys. A layer with a Gated DeltaNet
stores the last inputs and the states of requests, as `Ops.delta_net` describes."""


class AttentionPlan:
    """The spans of one batch, prepared for attention. A plan is made once per iteration and used by
    all layers.

    Callers get a plan from `plan_attention`, and pass it unread to `attention` of the same `Ops`.
    Each implementation has its own subclass.
    """

    __slots__ = ()


class PlanAttention(Protocol):
    """Prepares attention for one batch, which may contain both prefills and decodes."""

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
        is_causal: bool = ...,
        uploads: Uploads,
        has_fixed_shape: bool = ...,
    ) -> AttentionPlan:
        """Returns the plan of a batch, for layers of any of the `windows`.

        Args:
            start_positions: [n_spans], the position in the sequence of each span's first token.
            n_tokens: [n_spans], the number of tokens of each span.
            block_tables: [n_spans, any width], the ids of the blocks of each span's sequence, in
                order. The remaining columns of a row hold any valid ids.
            key_caches: the key storage of one layer [n_blocks, block_size, n_kv_heads, head_dim]
                for each kind of K/V heads that layers have. Only shapes and types are used.
            n_heads: the number of query heads of this rank.
            windows: the different windows of the layers (see `AttentionForm`); by default no layer
                has a window.
            is_causal: `AttentionForm.is_causal` of all layers, by default true.
            uploads: receives the tensors of the plan. The caller must flush `uploads` before
                `attention` reads the tensors.
            has_fixed_shape: whether the shapes of the plan may depend only on the shape of
                `block_tables`. Every span must then be one token. Requires `has_fixed_shapes` of
                the operations.
        """


class ComputeAttention(Protocol):
    """Computes attention from every token of a batch to the stored tokens of the same sequence."""

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
        """Returns the attention of all tokens, [n_tokens, n_heads, value_dim], for the queries `q`
        [n_tokens, n_heads, head_dim].

        The caches [n_blocks, block_size, n_kv_heads, head_dim] are the dense storage of one layer.
        The keys and values of the batch itself are already stored there. If values are the first
        elements of keys, `value_cache` is `key_cache[..., :value_dim]`. `plan` must have been made
        for the window and for the `is_causal` of `form`. By default, attention is causal and has
        neither a window nor a soft cap, and the scale is `1 / sqrt(head_dim)`.

        `sinks` [n_heads] are float32 and dense. The sink of a head is a further score in the
        softmax of each query of the head, whatever the window. A sink has no value: it only takes
        weight away from the keys.
        """


class RunExpertMLPs(Protocol):
    """Runs the experts of a layer on their tokens. The matrices of all experts are arguments."""

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
        """Returns, for every token t, the weighted sum of its experts' outputs: `sum_i weights[t,
        i] * mlp of experts[t, i] (x[t])`.

        `x` is [n_tokens, hidden]. `experts` and `weights` are [n_tokens, n_chosen]. `experts` are
        int64, and a token has no expert twice. `gate_up` is [n_experts, 2 * size, hidden], the
        gate's rows first, and `down` [n_experts, hidden, size]. The result is [n_tokens, hidden].
        """


class TurnAndWriteKV(Protocol):
    """Rotates queries and keys of a fused projection, and stores the rotated keys and the
    values."""

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
        """Stores keys and values, and returns the rotated queries [n_tokens, n_heads, head_dim].
        `kernels.pytorch.rotary` describes the arguments."""


class Ranks(Protocol):
    """The collective operations between the ranks that share a stage."""

    def all_reduce(self, tensor: Tensor, /) -> None:
        """Sums `tensor` over all ranks, in place."""

    def all_gather(self, tensor: Tensor, /) -> Tensor:
        """Returns the tensors of all ranks, joined along the last dimension in the order of the
        ranks."""


class ProgramBatch(Protocol):
    """A batch for a program. It has the tokens of all spans, one span after the other."""

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, [n_tokens] int64."""

    @property
    def slots(self) -> Tensor:
        """K/V slot where each token's key and value are stored, [n_tokens] int64."""

    @property
    def attention(self) -> AttentionPlan:
        """Attention plan of the batch, made by the operations that run the program."""

    @property
    def states(self) -> StateSpans | None:
        """The spans of the batch, with the row of each request's state. None if no layer keeps
        states."""

    @property
    def adapters(self) -> BatchAdapters | None:
        """The rows of the batch, grouped by adapter. None if no token has an adapter."""

    @property
    def ranks(self) -> Ranks:
        """The collective operations of the ranks that share the stage."""

    def of_groups(self) -> Sequence[ProgramBatch]:
        """Returns a batch for each K/V group of layers, with the slots and the attention plan of
        that group. The plans differ only in their block tables."""


class ProgramRunner(Protocol):
    """Runs one program. All runners on the same operations have bit-identical results."""

    @property
    def program(self) -> Program:
        """The program that is run."""

    def __call__(self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Returns the hidden states after the last layer, [n_tokens, hidden_size].

        Args:
            inputs: tokens [n_tokens] int64, or the hidden states [n_tokens, hidden_size] that the
                stage receives; hidden states may be overwritten.
            batch: the positions, slots and attention plan of the tokens.
            kv: the storage of each layer. If the first tensor is the same object as in the previous
                run, all other tensors must be the same objects, too.

        Raises:
            TypeError: a plan was made by other operations.
            ValueError: a tensor has another type or shape, or the batch lacks the K/V group of a
                layer.
            IndexError: a token or position is not in the tables.
        """

    def logits(
        self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Returns the logits of sampled tokens, [n_sampled, vocab_size].

        `sampled` [n_sampled] int64 are the indices of the sampled tokens in the batch, in ascending
        order. `__call__` describes the other arguments. The next run may overwrite the result.

        Raises:
            TypeError: a plan was made by other operations.
            ValueError: a tensor has another type or shape, or the program has no head.
            IndexError: a token or position is not in the tables, or an index is not in the batch.
        """

    def head(self, hidden: Tensor, ranks: Ranks, adapters: AdapterRows | None = None) -> Tensor:
        """Returns the logits [n, vocab_size] for hidden states [n, hidden_size] after the last
        layer, which may be from another batch. `adapters` are the adapters of these rows; None if
        no row has one. Raises ValueError if the program has no head."""


class RunProgram(Protocol):
    """Prepares a program so that it can be run for many batches."""

    def __call__(self, program: Program, ops: Ops, /) -> ProgramRunner:
        """Returns the fastest runner of the program with the operations `ops`. Must be called as
        `ops.run_program(program, ops)`.

        Raises ValueError for tensors that do not fit each other, and TypeError for a step that
        cannot be run.
        """


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one implementation, for one kind of device, and the function that runs
    programs."""

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
    """Whether attention plans can have shapes that do not depend on the contents of a batch. Only
    then can an iteration be recorded as a CUDA graph."""

    @classmethod
    def of(cls, *sources: object, otherwise: Ops | None = None, **given: Any) -> Self:
        """Returns operations whose fields are collected from `sources`, by name. Later sources
        replace the functions of earlier ones.

        A source is a module or an object. A module offers the functions that it defines, an object
        offers its methods. An operation that no source has is taken from `otherwise`. Keyword
        arguments `given` set the fields of the same names directly. Raises TypeError if an
        operation is found nowhere.
        """
        names = [field.name for field in fields(cls)]
        found = {} if otherwise is None else {name: getattr(otherwise, name) for name in names}
        for source in sources:
            offered = _offered(source)
            found.update((name, offered[name]) for name in names if name in offered)
        return cls(**{**found, **given})

    def runner(self, program: Program) -> ProgramRunner:
        """Returns a runner of the program on these operations. `RunProgram` describes the
        errors."""
        return self.run_program(program, self)


def _offered(source: object) -> dict[str, Any]:
    """Returns, by name, the functions that a module defines or the methods of an object."""
    if not isinstance(source, ModuleType):
        return {name: getattr(source, name) for name in dir(source)}
    return {
        name: value
        for name, value in vars(source).items()
        if getattr(value, "__module__", None) == source.__name__
    }
