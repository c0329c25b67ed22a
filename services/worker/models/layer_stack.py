"""How a stage runs its layers: one after the other, or as a program where that is quicker.

Every stage can run layer by layer. It is also recorded as a program (`recording.py`), from tokens
to logits as far as its pieces say their steps, and operations may run that without Python in
between (`Ops.fuse_layers`). Results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.logits import Logits
from kernels.ops import FusedStage, LayerKV
from kernels.program import Angles, Program
from services.worker.models.decoder_layers import Embedding, Head, Layer
from services.worker.models.recording import Recorder
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.stage import StageBatch, StagePlace


class LayerStack(Protocol):
    """Computes a stage: its embedding, if it is the first one, its layers, and its head, if it is
    the last one.

    Inputs are tokens [n_tokens] on the first stage, and elsewhere hidden states [n_tokens, hidden],
    which are used up. The batch's keys and values are stored in `kv`, an entry for each layer.
    """

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Returns the hidden states after the last layer, [n_tokens, hidden]."""

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Returns the logits of sampled tokens, [n_sampled, vocab_size]; last stage only.

        `sampled` [n_sampled] int64 are their places in the batch, in order. The next call may
        overwrite the result. Raises RuntimeError on another stage.
        """


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """Calls each layer, on any device."""

    embedding: Embedding | None  # the first stage has one
    rotaries: Sequence[RotaryEmbedding]
    layers: Sequence[Layer]
    head: Head | None  # the last stage has one
    hidden_size: int
    groups: Sequence[int] = ()  # the K/V group of each layer; empty: all are in the first

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Implements `LayerStack`."""
        hidden = self.embedded(inputs, batch)
        batch = self.angled(batch)
        batches = batch.of_groups()
        groups = self.groups or (0,) * len(self.layers)
        for layer, group, layer_kv in zip(self.layers, groups, kv, strict=True):
            hidden = layer(hidden, batches[group], layer_kv)
        return hidden

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Implements `LayerStack.logits`."""
        return self.headed(self(inputs, batch, kv), batch, sampled)

    def angled(self, batch: StageBatch) -> StageBatch:
        """Returns the batch with the angles of its tokens."""
        return replace(batch, angles=[rotary(batch.positions) for rotary in self.rotaries])

    def embedded(self, inputs: Tensor, batch: StageBatch) -> Tensor:
        """Returns what goes into the first layer, [n_tokens, hidden]."""
        return inputs if self.embedding is None else self.embedding(inputs, batch)

    def headed(self, hidden: Tensor, batch: StageBatch, sampled: Tensor) -> Logits:
        """Returns the logits of the tokens at `sampled` from the last layer's hidden states.

        Raises RuntimeError where there is no head.
        """
        if self.head is None:
            raise RuntimeError("only the last stage has logits")
        if len(sampled) < len(hidden):
            hidden = hidden.index_select(0, sampled)
        return Logits(self.head(hidden, batch.ranks))


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Runs the program of all layers, and of the embedding and the head if they are in it."""

    fused: FusedStage
    by_layer: LayerByLayer  # whose embedding and head are called where the program has none

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Implements `LayerStack`; raises TypeError for a plan of other operations."""
        return self.fused(self._given(inputs, batch), self._angled(batch), kv)

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Implements `LayerStack.logits`; raises TypeError for a batch that other operations have
        planned."""
        if self.fused.program.logits is None:
            return self.by_layer.headed(self(inputs, batch, kv), batch, sampled)
        return self.fused.logits(self._given(inputs, batch), self._angled(batch), kv, sampled)

    def _given(self, inputs: Tensor, batch: StageBatch) -> Tensor:
        """Returns what the program begins with: tokens, or hidden states. Angles reach as far as
        the batch then."""
        for rotary in self.by_layer.rotaries:
            rotary.cover(batch.positions)
        if self.fused.program.inputs is None:
            return inputs
        return self.by_layer.embedded(inputs, batch)

    def _angled(self, batch: StageBatch) -> StageBatch:
        """Returns the batch with its angles, if the program has calls that may want them."""
        return self.by_layer.angled(batch) if self.fused.program.has_calls else batch


def stack(by_layer: LayerByLayer, place: StagePlace, dtype: torch.dtype) -> LayerStack:
    """Returns the fastest way to compute what `by_layer` does.

    `dtype` is that of hidden states and K/V. Raises ValueError for tensors of other types.
    """
    angles = [rotary.angles for rotary in by_layer.rotaries if rotary.angles is not None]
    if place.ops.fuse_layers is None or len(angles) < len(by_layer.rotaries):
        return by_layer
    fused = place.ops.fuse_layers(recorded(by_layer, angles, place.tp_size, dtype))
    return by_layer if fused is None else AllAtOnce(fused, by_layer)


def recorded(
    by_layer: LayerByLayer, angles: Sequence[Angles], tp_size: int, dtype: torch.dtype
) -> Program:
    """Returns the program of a stage that `tp_size` ranks share.

    It takes in hidden states where the embedding does not say its steps, and makes none of logits
    where the head does not.
    """
    to = Recorder(dtype, angles, by_layer.groups, tp_size)
    hidden = to.embedding(by_layer.embedding)
    if hidden is None:
        hidden = to.take_in(by_layer.hidden_size)
    for i, layer in enumerate(by_layer.layers):
        hidden = to.layer(layer, hidden, i)
    to.end_layers(hidden)
    if by_layer.head is not None:
        to.end_head(to.head(by_layer.head, to.select(hidden)))
    return to
