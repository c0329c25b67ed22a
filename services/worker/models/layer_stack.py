"""How a stage runs its layers: one after the other, or all in one call where there is one.

Every stage can run layer by layer. A stage of a single rank that descends from Llama (rotary
attention and a gated MLP behind root-mean-square norms) is described to its operations by
`kernels.layer.StageWeights`, and these may have one call for all of it (`Ops.fuse_layers`). The
call begins with tokens where they are the rows of a plain table, and ends with logits where the
head is a norm and a product. Results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels import AttentionPlan
from kernels.layer import GatedMLPWeights, HeadWeights, LayerWeights, Norm, StageWeights
from kernels.logits import Logits
from kernels.ops import FusedStage, LayerKV
from kernels.packed_linear import PlainWeight
from services.worker.models.decoder_layers import (
    Attention,
    Embedding,
    Head,
    Layer,
    NormedHead,
    PreNormLayer,
    TokenEmbedding,
)
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
    groups: Sequence[int] = ()  # the K/V group of each layer; empty: all are in the first

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Implements `LayerStack`."""
        hidden = self.embedded(inputs, batch)
        batch = replace(batch, angles=[rotary(batch.positions) for rotary in self.rotaries])
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
    """Calls all layers at once, and with them the table and the head if the call has them."""

    fused: FusedStage
    by_layer: LayerByLayer  # whose embedding and head are called where the fused stage has none

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Implements `LayerStack`; raises TypeError for a plan of other operations."""
        inputs = self._given(inputs, batch)
        return self.fused(inputs, batch.positions, *_of_groups(batch), kv)

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Implements `LayerStack.logits`; raises TypeError for a batch that other operations have
        planned."""
        if self.fused.stage.head is None:
            return self.by_layer.headed(self(inputs, batch, kv), batch, sampled)
        inputs = self._given(inputs, batch)
        return self.fused.logits(inputs, batch.positions, *_of_groups(batch), kv, sampled)

    def _given(self, inputs: Tensor, batch: StageBatch) -> Tensor:
        """Returns what the fused stage begins with: tokens, or hidden states. Angles reach as far
        as the batch then."""
        for rotary in self.by_layer.rotaries:
            rotary.cover(batch.positions)
        if self.fused.stage.table is None:
            return self.by_layer.embedded(inputs, batch)
        return inputs


def _of_groups(batch: StageBatch) -> tuple[Sequence[Tensor], Sequence[AttentionPlan]]:
    """Returns the slots and the attention of each K/V group of a batch."""
    batches = batch.of_groups()
    return [each.slots for each in batches], [each.attention for each in batches]


def stack(by_layer: LayerByLayer, place: StagePlace, dtype: torch.dtype) -> LayerStack:
    """Returns the fastest way to compute what `by_layer` does, which has one layer at least.

    `dtype` is that of hidden states and K/V. Raises ValueError for weights of other types.
    """
    if place.tp_size > 1:
        return by_layer  # ranks meet within each layer
    weights = described(by_layer)
    fused = None if weights is None else place.ops.fuse_layers(weights, dtype)
    return by_layer if fused is None else AllAtOnce(fused, by_layer)


def described(by_layer: LayerByLayer) -> StageWeights | None:
    """Returns the description of a stage whose layers descend from Llama; None for others.

    A table or a head that is more than that is left out of it.
    """
    layers: list[LayerWeights] = []
    rotaries: set[int] = set()
    groups = by_layer.groups or (0,) * len(by_layer.layers)
    for layer, group in zip(by_layer.layers, groups, strict=True):
        if not isinstance(layer, PreNormLayer) or layer.attention.rotary is None:
            return None
        weights = _layer_weights(layer, group)
        if weights is None:
            return None
        layers.append(weights)
        rotaries.add(layer.attention.rotary)
    if len(rotaries) > 1:
        return None
    angles = by_layer.rotaries[rotaries.pop()].angles
    if angles is None:
        return None
    return StageWeights(
        _table(by_layer.embedding),
        angles,
        layers,
        _head_weights(by_layer.head),
    )


def _layer_weights(layer: PreNormLayer, group: int) -> LayerWeights | None:
    """Returns the description of a layer of a K/V group; None if it has other norms or another MLP
    than Llama."""
    before, between, mlp = layer.attention_norm, layer.mlp_norm, layer.mlp
    if type(layer.attention) is not Attention:  # others compute more than their description says
        return None
    if not (isinstance(before, Norm) and isinstance(between, Norm)):
        return None
    if not isinstance(mlp, GatedMLPWeights):
        return None
    return LayerWeights(before, layer.attention, between, mlp, group)


def _table(embedding: Embedding | None) -> Tensor | None:
    """Returns the table [vocab_size, hidden] whose rows are what `embedding` returns for tokens;
    None if there is none."""
    if not isinstance(embedding, TokenEmbedding):
        return None
    table = embedding.table.table
    return table.weight if isinstance(table, PlainWeight) else None


def _head_weights(head: Head | None) -> HeadWeights | None:
    """Returns the description of a head; None if it is more than a norm and a product."""
    if not isinstance(head, NormedHead) or not isinstance(head.norm, Norm):
        return None
    return HeadWeights(head.norm, head.projection.weight)
