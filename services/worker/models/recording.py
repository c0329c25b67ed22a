"""How layers become the steps of a program (`kernels.program`).

A piece of a layer that can say its steps has a method `record` beside its `__call__`, with the same
arguments: where the one computes with tensors, the other writes down what is to be computed with
buffers. A piece without it becomes a step that calls it. So a family of known pieces runs in one
native call, and one with a new piece in several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.ops import LayerKV
from kernels.program import Angles, Program
from kernels.steps import Buffer
from services.worker.models.stage import StageBatch


@runtime_checkable
class Recorded(Protocol):
    """A piece that says its steps."""

    def record(self, to: Recorder, *arguments: Any) -> Any:
        """Adds its steps and returns the buffer of its result; None from an embedding or a head
        that is to be called outside of the program."""


class Recorder(Program):
    """A program that knows by how many ranks its layers are shared."""

    def __init__(
        self, dtype: torch.dtype, angles: Sequence[Angles], groups: Sequence[int], tp_size: int
    ) -> None:
        super().__init__(dtype, angles, groups)
        self.tp_size = tp_size

    def all_reduce(self, x: Buffer) -> None:
        """Sums `x` over the ranks, in place."""
        if self.tp_size > 1:
            self.call(_all_reduce, x)

    def embedding(self, embedding: object) -> Buffer | None:
        """Returns the buffer of the batch's embedded tokens; None if it does not say its steps."""
        return embedding.record(self) if isinstance(embedding, Recorded) else None

    def head(self, head: object, hidden: Buffer) -> Buffer | None:
        """Returns the buffer of the logits; None if it does not say its steps."""
        return head.record(self, hidden) if isinstance(head, Recorded) else None

    def norm(self, norm: Callable[[Tensor], Tensor], x: Buffer) -> Buffer:
        """Returns `norm(x)`."""
        if isinstance(norm, Recorded):
            recorded: Buffer = norm.record(self, x)
            return recorded
        out = self.buffer(x.width, is_of_sampled=x.is_of_sampled)
        self.call(lambda batch, kv, x, out: out.copy_(norm(x)), x, out)
        return out

    def attention(
        self, attention: _Attention, x: Buffer, layer: int, residual: Buffer | None = None
    ) -> Buffer:
        """Returns `attention(x, batch, kv, residual)` for the storage of a layer."""
        if isinstance(attention, Recorded):
            recorded: Buffer = attention.record(self, x, layer, residual)
            return recorded
        group = self.group_of(layer)

        def attend(
            batch: StageBatch, kv: Sequence[LayerKV], x: Tensor, out: Tensor, *rest: Tensor
        ) -> None:
            out.copy_(attention(x, batch.of_groups()[group], kv[layer], *rest))

        return self._called(attend, x, residual)

    def mlp(self, mlp: _MLP, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Returns `mlp(x, batch.ranks, residual)`."""
        if isinstance(mlp, Recorded):
            recorded: Buffer = mlp.record(self, x, residual)
            return recorded

        def run(batch: StageBatch, kv: object, x: Tensor, out: Tensor, *rest: Tensor) -> None:
            out.copy_(mlp(x, batch.ranks, *rest))

        return self._called(run, x, residual)

    def layer(self, layer: _Layer, hidden: Buffer, index: int) -> Buffer:
        """Returns `layer(hidden, batch, kv)` for the storage of the layer `index` of the stage."""
        if isinstance(layer, Recorded):
            recorded: Buffer = layer.record(self, hidden, index)
            return recorded
        group = self.group_of(index)

        def run(batch: StageBatch, kv: Sequence[LayerKV], hidden: Tensor) -> None:
            hidden.copy_(layer(hidden, batch.of_groups()[group], kv[index]))

        self.call(run, hidden)
        return hidden

    def _called(self, function: Callable[..., None], x: Buffer, residual: Buffer | None) -> Buffer:
        """Returns the buffer that `function` writes, given `x`, it, and the residual if any, which
        it is then."""
        if residual is None:
            out = self.buffer(x.width)
            self.call(function, x, out)
            return out
        self.call(function, x, residual, residual)
        return residual


class _Attention(Protocol):
    def __call__(
        self, x: Tensor, batch: StageBatch, kv: LayerKV, residual: Tensor | None = None
    ) -> Tensor: ...


class _MLP(Protocol):
    def __call__(self, x: Tensor, ranks: Any, residual: Tensor | None = None) -> Tensor: ...


class _Layer(Protocol):
    def __call__(self, hidden: Tensor, batch: StageBatch, kv: LayerKV) -> Tensor: ...


def _all_reduce(batch: StageBatch, kv: object, x: Tensor) -> None:
    batch.ranks.all_reduce(x)
