"""Decoders with several residual streams, of which a layer computes one.

A layer predicts all streams, computes the active stream, and corrects all streams by the difference
between the computed and the predicted active stream (AltUp; Baykal et al., 2023). The embedding of
a token is the first stream, and the others are projections of it. The head reads the mean of all
streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels.packing.linear import pack
from kernels.program import Program
from kernels.steps import Buffer
from kernels.weights.linear import LinearWeight
from services.worker.models.decoder_layers import MLP, Attention, Embedding, Head, Norm
from services.worker.models.per_layer_inputs import PerLayerGate, PerLayerTable
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, slots=True)
class AltUp:
    """Predicts the residual streams after a layer, and corrects the prediction.

    A layer computes only one stream, from which the correction of all streams is derived. Streams
    are [n_tokens, n_streams, hidden]. Sums over streams are computed in float32, stream by stream.
    """

    norm: Norm
    router: LinearWeight  # [n_streams, hidden]
    predicting: LinearWeight  # [n_streams * n_streams, n_streams]
    correcting: LinearWeight  # [n_streams, n_streams]
    n_streams: int
    active: int  # index of the stream that the layer computes
    factor: float  # factor of the router's input

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        *,
        norm: Norm,
        hidden_size: int,
        n_streams: int,
        active: int,
    ) -> Self:
        """Reads the matrices under `prefix`, which are not quantised."""

        def weight(name: str, n_out: int, n_in: int) -> LinearWeight:
            return pack(source.tensor(f"{prefix}.{name}.weight", n_out, n_in))

        n = n_streams
        return cls(
            norm,
            weight("modality_router", n, hidden_size),
            weight("prediction_coefs", n * n, n),
            weight("correction_coefs", n, n),
            n,
            active,
            hidden_size**-1.0,
        )

    def describe_routed(self, to: Program, active: Buffer) -> Buffer:
        """Adds the steps of the router to a program. Returns the router's output [n_tokens,
        n_streams] for `active`, the active stream [n_tokens, hidden]."""
        normed = self.norm.describe(to, active)
        return to.multiply(self.router, to.scale(normed, self.factor))

    def predict(self, routed: Tensor, streams: Tensor) -> Tensor:
        """Returns the predicted streams after the layer, in the shape of `streams`.

        `routed` is the router's output for the active stream before the layer.
        """
        coefs = self.predicting(_modes(routed)).float()
        coefs = coefs.view(-1, self.n_streams, self.n_streams)  # [n_tokens, to, from]
        wide = streams.float()
        predicted = wide.clone()
        for i in range(self.n_streams):
            predicted += coefs[:, :, i, None] * wide[:, i, None]
        return predicted.to(streams.dtype)

    def correct(self, routed: Tensor, predicted: Tensor, computed: Tensor) -> Tensor:
        """Returns all predicted streams, each corrected by its part of the active stream's
        prediction error.

        The error is `computed` [n_tokens, hidden] minus the prediction. `routed` is the router's
        output for `computed`.
        """
        coefs = self.correcting(_modes(routed)) + 1
        surprise = computed - predicted[:, self.active]
        return predicted + coefs[:, :, None] * surprise[:, None]


def _modes(routed: Tensor) -> Tensor:
    """Returns the tanh of the router's output, [n_tokens, n_streams]. The coefficients of
    prediction and of correction are linear functions of it."""
    return torch.tanh(routed.float()).to(routed.dtype)


@dataclass(frozen=True, slots=True)
class Laurel:
    """Adds a low-rank product of its input to this input. The sum is then added to the output of
    attention."""

    left: LinearWeight  # [rank, hidden]
    right: LinearWeight  # [hidden, rank]
    norm: Norm

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds the steps of this part to a program, and returns `x` plus the normalised low-rank
        product, [n_tokens, hidden]. The steps may overwrite `x`."""
        low = to.multiply(self.left, x)
        return to.add(x, self.norm.describe(to, to.multiply(self.right, low)))


@dataclass(frozen=True, slots=True)
class StreamsLayer:
    """A layer that predicts all streams, computes the active one, and corrects all streams."""

    altup: AltUp
    attention_norm: Norm
    laurel: Laurel
    attention: Attention
    attended_norm: Norm
    mlp_norm: Norm
    mlp: MLP
    mlp_out_norm: Norm
    per_layer: PerLayerGate
    scale: Tensor | None  # [hidden], of the corrected stream that sees the layer's own inputs

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        altup, size, n_all = self.altup, self.size, self.altup.n_streams * self.size
        predicted, corrected, scaled = to.buffer(n_all), to.buffer(n_all), to.buffer(size)
        routed = altup.describe_routed(to, to.take_part(hidden, altup.active * size, size))
        to.call("predicted streams", self._predicted, (routed, hidden), predicted)
        active = to.take_part(predicted, altup.active * size, size)
        computed = self._describe_active(to, active, layer)
        routed = altup.describe_routed(to, computed)
        inputs = routed, predicted, computed
        to.call("corrected streams", self._corrected, inputs, corrected, scaled)
        own = self.per_layer.describe(to, scaled, hidden)
        to.call("sum of streams and inputs", self._with_inputs, (corrected, own), corrected)
        to.copy_part(corrected, 0, n_all, hidden, 0)
        return hidden

    def _describe_active(self, to: Program, active: Buffer, layer: int) -> Buffer:
        """Adds attention and the MLP to a program, and returns the active stream after them. The
        steps may overwrite `active`."""
        normed = self.attention_norm.describe(to, active)
        attended = self.attended_norm.describe(to, self.attention.describe(to, normed, layer))
        attended = to.add(to.add(active, attended), self.laurel.describe(to, normed))
        attended = to.scale(attended, 2**-0.5)
        changed = self.mlp.describe(to, self.mlp_norm.describe(to, attended))
        return to.add(attended, self.mlp_out_norm.describe(to, changed))

    @property
    def size(self) -> int:
        """The number of elements of a stream."""
        return self.per_layer.projection.shape[0]

    def _streams(self, rows: Tensor) -> Tensor:
        """Returns the streams as [n_tokens, n_streams, hidden]. They are the first elements of
        `rows`."""
        return _streams(rows, self.altup.n_streams, self.size)

    def _predicted(self, routed: Tensor, hidden: Tensor) -> Tensor:
        return self.altup.predict(routed, self._streams(hidden)).flatten(1)

    def _corrected(
        self, routed: Tensor, predicted: Tensor, computed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the corrected streams, and the scaled active stream. The gates of the per-layer
        inputs are computed from the scaled active stream."""
        corrected = self.altup.correct(routed, self._streams(predicted), computed)
        active = corrected[:, self.altup.active]
        scaled = active.clone() if self.scale is None else active * self.scale
        return corrected.flatten(1), scaled

    def _with_inputs(self, corrected: Tensor, own: Tensor) -> Tensor:
        """Adds the gated per-layer inputs `own` to all streams of `corrected` except the
        first one."""
        self._streams(corrected)[:, 1:] += own[:, None]
        return corrected


def _streams(rows: Tensor, n_streams: int, size: int) -> Tensor:
    """Returns the streams as [n_tokens, n_streams, hidden]. They are the first elements of
    `rows`."""
    return rows[:, : n_streams * size].view(-1, n_streams, size)


def _mean_square(x: Tensor) -> Tensor:
    """Returns the mean square of each row of `x` [n_tokens, size], as [n_tokens, 1] in float32."""
    return x.float().square().sum(-1, keepdim=True) / x.shape[-1]


@dataclass(frozen=True, slots=True)
class StreamsEmbedding:
    """Embeds tokens as the first stream, computes the other streams as projections of the first,
    and appends the per-layer inputs."""

    tokens: Embedding
    projections: Sequence[LinearWeight]  # [hidden, hidden], of the streams after the first
    per_layer: PerLayerTable

    def describe(self, to: Program) -> Buffer:
        first = self.tokens.describe(to)
        others = [to.buffer(first.width) for _ in self.projections]
        to.call("streams of embeddings", self._others, (first,), *others)
        return to.join(first, *others, self.per_layer.describe(to, first))

    def _others(self, first: Tensor) -> tuple[Tensor, ...]:
        """Computes the streams after the first one. Each has the shape of `first`."""
        magnitude = _mean_square(first).sqrt()
        others = (_of_magnitude(weight(first), magnitude) for weight in self.projections)
        return tuple(each.to(first.dtype) for each in others)


def _of_magnitude(x: Tensor, magnitude: Tensor) -> Tensor:
    """Returns `x` in float32, scaled so that each row has the root mean square `magnitude`
    [n_tokens, 1]."""
    return x.float() * magnitude / _mean_square(x).clamp(min=1e-5).sqrt()


@dataclass(frozen=True, slots=True)
class StreamsHead:
    """A head that computes logits from the mean of all streams. Every stream except the first is
    projected before the mean is taken."""

    head: Head
    projections: Sequence[LinearWeight]  # [hidden, hidden]
    size: int  # of a stream

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        mean = to.buffer(self.size, is_of_sampled=hidden.is_of_sampled)
        to.call("mean of streams", self._mean, (hidden,), mean)
        return self.head.describe(to, mean)

    def _mean(self, hidden: Tensor) -> Tensor:
        """Returns the mean of all streams, [n_tokens, size]."""
        n_streams = len(self.projections) + 1
        first, *others = _streams(hidden, n_streams, self.size).unbind(1)
        magnitude = _mean_square(first).sqrt()
        total = first.float()
        for stream, weight in zip(others, self.projections, strict=True):
            total = total + _of_magnitude(weight(stream.contiguous()), magnitude)
        return (total / n_streams).to(hidden.dtype)
