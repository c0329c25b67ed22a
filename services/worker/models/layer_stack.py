"""How a stage runs its layers and its head: one by one, or on a CPU at once where that is the same.

What the native library can run at once are layers of a single rank that descend from Llama: rotary
attention and a gated MLP behind root-mean-square norms, all weights in its own forms. With a head
of that kind it goes on to the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.native.attention import AttentionSpans
from kernels.native.layers import Gated, NativeHead, NativeLayer, NativeLayers, Projection
from services.worker.models.decoder_layers import (
    Attention,
    DecoderBatch,
    GatedMLP,
    Head,
    Layer,
    NormedHead,
    PreNormLayer,
)
from services.worker.models.layers import RMSNorm
from services.worker.models.stage import LayerKV, StagePlace


class LayerStack(Protocol):
    """All layers of a stage: hidden states [n_tokens, hidden], used up, to the same shape.

    K and V are stored on the way, in each layer's `kv`.
    """

    def __call__(self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV]) -> Tensor: ...

    def logits(
        self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Tensor:
        """Of the same the logits [n_sampled, vocab_size] after the tokens `sampled` [n_sampled],
        in order; last stage only."""


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """Each layer is called, on any device."""

    layers: Sequence[Layer]
    head: Head | None  # the last stage has one

    def __call__(self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV]) -> Tensor:
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden = layer(hidden, batch, layer_kv)
        return hidden

    def logits(
        self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Tensor:
        return _logits(self.head, self(hidden, batch, kv), batch, sampled)


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """The native library is called for all layers, on a CPU."""

    layers: NativeLayers
    rotary: int  # which of the batch's angles turn queries and keys
    head: Head | None  # as above; the library may have it too

    def __call__(self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV]) -> Tensor:
        return self._run(hidden, batch, kv, None)

    def logits(
        self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Tensor:
        if self.layers.head is None:
            return _logits(self.head, self(hidden, batch, kv), batch, sampled)
        return self._run(hidden, batch, kv, sampled)

    def _run(
        self, hidden: Tensor, batch: DecoderBatch, kv: Sequence[LayerKV], sampled: Tensor | None
    ) -> Tensor:
        if not isinstance(batch.attention, AttentionSpans):
            raise TypeError("the batch was planned with other operations")
        cos, sin = batch.angles[self.rotary]
        return self.layers(hidden, cos, sin, batch.slots, batch.attention, kv, sampled)


def stack(
    layers: Sequence[Layer], head: Head | None, place: StagePlace, dtype: torch.dtype
) -> LayerStack:
    """The fastest way to run `layers`, of which there is one at least, and `head` if there is one;
    `dtype` is that of K/V."""
    one_by_one = LayerByLayer(layers, head)
    if place.ops.layers is None or place.tp_size > 1:
        return one_by_one
    native: list[NativeLayer] = []
    rotaries: set[int] = set()
    for layer in layers:
        if not isinstance(layer, PreNormLayer) or layer.attention.rotary is None:
            return one_by_one
        same = _native_layer(layer, layer.attention)
        if same is None:
            return one_by_one
        native.append(same)
        rotaries.add(layer.attention.rotary)
    if len(rotaries) > 1 or len({layer.sizes for layer in native}) > 1:
        return one_by_one
    return AllAtOnce(place.ops.layers(native, _native_head(head), dtype), rotaries.pop(), head)


def _logits(head: Head | None, hidden: Tensor, batch: DecoderBatch, sampled: Tensor) -> Tensor:
    if head is None:
        raise RuntimeError("only the last stage has logits")
    if len(sampled) < len(hidden):
        hidden = hidden.index_select(0, sampled)
    return head(hidden, batch.ranks)


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
