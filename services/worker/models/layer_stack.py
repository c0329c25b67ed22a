"""How a stage runs its layers: one by one, or on a CPU at once where that is the same.

What the native library can run at once are layers of a single rank that descend from Llama: rotary
attention and a gated MLP behind root-mean-square norms, all weights in its own forms. It begins
with the tokens where these are the rows of a plain table, and goes on to the logits where the head
is a norm and a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.logits import Logits
from kernels.native.attention import AttentionSpans
from kernels.native.layers import NativeLayers
from kernels.native.stage import (
    Gated,
    NativeAngles,
    NativeHead,
    NativeLayer,
    NativeStage,
    Projection,
)
from kernels.packed_linear import PlainWeight
from services.worker.models.decoder_layers import (
    Attention,
    Embedding,
    GatedMLP,
    Head,
    Layer,
    NormedHead,
    PreNormLayer,
    TokenEmbedding,
)
from services.worker.models.layers import RMSNorm, RotaryEmbedding
from services.worker.models.stage import LayerKV, StageBatch, StagePlace


class LayerStack(Protocol):
    """All that a stage computes: of tokens [n_tokens] on the first one, and elsewhere of hidden
    states [n_tokens, hidden], which are used up, those after the last layer.

    K and V are stored on the way, in each layer's `kv`.
    """

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor: ...

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Of the same the logits after the tokens at the places `sampled` [n_sampled], in order;
        last stage only. The next call may overwrite them."""


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """Each layer is called, on any device."""

    embedding: Embedding | None  # the first stage has one
    rotaries: Sequence[RotaryEmbedding]
    layers: Sequence[Layer]
    head: Head | None  # the last stage has one

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        hidden = self.embedded(inputs, batch)
        batch = replace(batch, angles=[rotary(batch.positions) for rotary in self.rotaries])
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden = layer(hidden, batch, layer_kv)
        return hidden

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        return self.headed(self(inputs, batch, kv), batch, sampled)

    def embedded(self, inputs: Tensor, batch: StageBatch) -> Tensor:
        """What goes into the first layer."""
        return inputs if self.embedding is None else self.embedding(inputs, batch)

    def headed(self, hidden: Tensor, batch: StageBatch, sampled: Tensor) -> Logits:
        """Of what comes out of the last layer the logits after the tokens at `sampled`."""
        if self.head is None:
            raise RuntimeError("only the last stage has logits")
        if len(sampled) < len(hidden):
            hidden = hidden.index_select(0, sampled)
        return Logits(self.head(hidden, batch.ranks))


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """The native library is called for all layers, on a CPU."""

    native: NativeLayers
    by_layer: LayerByLayer  # the same, for what the library has not of what is around the layers

    def __call__(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        return self.native(*self._arguments(inputs, batch, kv))

    def logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        if self.native.stage.head is None:
            return self.by_layer.headed(self(inputs, batch, kv), batch, sampled)
        return self.native.logits(*self._arguments(inputs, batch, kv), sampled)

    def _arguments(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionSpans, Sequence[LayerKV]]:
        if not isinstance(batch.attention, AttentionSpans):
            raise TypeError("the batch was planned with other operations")
        if self.native.stage.table is None:
            inputs = self.by_layer.embedded(inputs, batch)
        return inputs, batch.positions, batch.slots, batch.attention, kv


def stack(by_layer: LayerByLayer, place: StagePlace, dtype: torch.dtype) -> LayerStack:
    """The fastest way to run the same, which has one layer at least; `dtype` is that of K/V."""
    if place.ops.layers is None or place.tp_size > 1:
        return by_layer
    native: list[NativeLayer] = []
    rotaries: set[int] = set()
    for layer in by_layer.layers:
        if not isinstance(layer, PreNormLayer) or layer.attention.rotary is None:
            return by_layer
        same = _native_layer(layer, layer.attention)
        if same is None:
            return by_layer
        native.append(same)
        rotaries.add(layer.attention.rotary)
    if len(rotaries) > 1 or len({layer.sizes for layer in native}) > 1:
        return by_layer
    rotary = by_layer.rotaries[rotaries.pop()]
    stage = NativeStage(
        _native_table(by_layer.embedding),
        NativeAngles(rotary.cos, rotary.signed_sin),
        native,
        _native_head(by_layer.head),
    )
    return AllAtOnce(place.ops.layers(stage, dtype), by_layer)


def _native_table(embedding: Embedding | None) -> Tensor | None:
    """The table [vocab_size, hidden] of which tokens are rows; None if they are something else."""
    if not isinstance(embedding, TokenEmbedding):
        return None
    table = embedding.table.table
    return table.weight if isinstance(table, PlainWeight) else None


def _native_head(head: Head | None) -> NativeHead | None:
    """The same for the native library; None if it does not have all of it."""
    if not (isinstance(head, NormedHead) and isinstance(head.norm, RMSNorm)):
        return None
    norm, weight = head.norm, head.projection.weight
    return NativeHead(norm.weight, norm.eps, weight) if isinstance(weight, Projection) else None


def _native_layer(layer: PreNormLayer, attention: Attention) -> NativeLayer | None:
    """The same for the native library; None if it does not have all of it."""
    before, between, mlp = layer.attention_norm, layer.mlp_norm, layer.mlp
    if not (isinstance(before, RMSNorm) and isinstance(between, RMSNorm)):
        return None
    if not isinstance(mlp, GatedMLP):
        return None
    qkv, output = attention.qkv.weight, attention.output.weight
    gate_up, down = mlp.inner, mlp.down.weight
    if not (isinstance(qkv, Projection) and isinstance(output, Projection)):
        return None
    if not (isinstance(gate_up, Gated) and isinstance(down, Projection)):
        return None
    return NativeLayer(
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        attention_norm=before.weight,
        attention_eps=before.eps,
        qkv=qkv,
        qkv_bias=attention.qkv.bias,
        head_norms=attention.head_norms,
        form=attention.form,
        output=output,
        output_bias=attention.output.bias,
        mlp_norm=between.weight,
        mlp_eps=between.eps,
        gate_up=gate_up,
        down=down,
        down_bias=mlp.down.bias,
    )
