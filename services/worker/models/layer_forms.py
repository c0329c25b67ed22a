"""Layers, embeddings and heads that differ from Llama's by additional norms, factors or caps."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.program import Program
from kernels.steps import Buffer
from services.worker.models.decoder_layers import MLP, Attention, Embedding, Head, Norm


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """Embeds tokens and multiplies the result by a factor."""

    tokens: Embedding
    factor: float

    def describe(self, to: Program) -> Buffer:
        return to.scale(self.tokens.describe(to), self.factor)


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """A layer that adds attention and an MLP to the residual stream. Each of the two has a norm
    before and a norm after it."""

    attention_norm: Norm
    attention: Attention
    attended_norm: Norm
    mlp_norm: Norm
    mlp: MLP
    mlp_out_norm: Norm

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        normed = self.attention_norm.describe(to, hidden)
        attended = self.attention.describe(to, normed, layer)
        hidden = to.add(hidden, self.attended_norm.describe(to, attended))
        changed = self.mlp.describe(to, self.mlp_norm.describe(to, hidden))
        return to.add(hidden, self.mlp_out_norm.describe(to, changed))


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """A layer that adds attention and an MLP to the residual stream. The output of each is
    normalised before it is added."""

    attention: Attention
    attended_norm: Norm
    mlp: MLP
    mlp_out_norm: Norm

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        attended = self.attention.describe(to, hidden, layer)
        hidden = to.add(hidden, self.attended_norm.describe(to, attended))
        return to.add(hidden, self.mlp_out_norm.describe(to, self.mlp.describe(to, hidden)))


@dataclass(frozen=True, slots=True)
class NormedSumLayer:
    """A layer that adds attention and then an MLP to the residual stream, and normalises each of
    the two sums."""

    attention: Attention
    attention_norm: Norm
    mlp: MLP
    mlp_norm: Norm

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        attended = self.attention.describe(to, hidden, layer, hidden)
        hidden = self.attention_norm.describe(to, attended)
        return self.mlp_norm.describe(to, self.mlp.describe(to, hidden, hidden))


@dataclass(frozen=True, slots=True)
class ScaledLayer:
    """A layer that adds attention and an MLP to the residual stream. Each of the two has a norm
    before it, and its output is multiplied by a factor."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP
    factor: float

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        normed = self.attention_norm.describe(to, hidden)
        hidden = to.add(hidden, self.attention.describe(to, normed, layer), self.factor)
        changed = self.mlp.describe(to, self.mlp_norm.describe(to, hidden))
        return to.add(hidden, changed, self.factor)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """A layer that adds attention and an MLP to the residual stream, both computed from one
    normalised input."""

    norm: Norm
    attention: Attention
    mlp: MLP

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        normed = self.norm.describe(to, hidden)
        return self.mlp.describe(to, normed, self.attention.describe(to, normed, layer, hidden))


@dataclass(frozen=True, slots=True)
class ScaledHead:
    """Computes logits and multiplies them by a factor."""

    head: Head
    factor: float

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        return to.scale(self.head.describe(to, hidden), self.factor)


@dataclass(frozen=True, slots=True)
class CappedHead:
    """Computes logits in float32 and limits them smoothly to a cap."""

    head: Head
    cap: float

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        return to.soft_cap(self.head.describe(to, hidden), self.cap)
