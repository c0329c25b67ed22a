"""Layers that model families share, built from a checkpoint's tensors, run on flat batches.

Plain objects that hold tensors, not `torch.nn.Module`s: nothing here is trained, moved or hooked,
and an attribute look-up of a module costs as much as a small kernel. A layer that reads a fused
weight (query, key and value; gate and up) reads its parts into one tensor, each part divided among
the ranks on its own.

What is divided (`tensor_parallel` says how) holds this rank's share and takes the collectives with
each call; what is not is the same on every rank. All tensors are [n_tokens, ...]: requests are only
seen inside the attention operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from kernels import Ops
from kernels.gated_in_two import GatedInTwo
from kernels.packed_linear import (
    Gate,
    GatedWeight,
    LinearWeight,
    PlainWeight,
    TableWeight,
)
from kernels.steps import Buffer
from services.worker.models.recording import Recorder
from services.worker.models.tensor_parallel import TensorParallel, even_share, vocab_share
from services.worker.models.weights import Part, Shard, TensorSource


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    """This rank's share of the outputs of `x @ weight.T + bias`; `x` is the same on every rank."""

    weight: LinearWeight  # [n_out of this rank, n_in]
    bias: Tensor | None  # [n_out of this rank]

    @classmethod
    def read(
        cls,
        source: TensorSource,
        names: Sequence[str],
        *,
        n_in: int,
        n_out: Sequence[int],
        has_bias: bool,
        shares: Sequence[range] | None = None,
        is_transposed: bool = False,
        order: Tensor | None = None,
    ) -> Self:
        """Reads the projections `names`, of `n_out` outputs each, as one.

        `shares` are the outputs of each that this rank has, by default an even part of each. A name
        may occur several times, with other shares: so one stored matrix is read as several
        projections. `is_transposed` says that matrices are stored as [n_in, n_out]. `order` are the
        places of this rank's outputs among those that are read, [n_out of this rank].
        """
        if shares is None:
            shares = [
                even_share(size, source.tp_rank, source.tp_size, what=f"outputs of {name}")
                for name, size in zip(names, n_out, strict=True)
            ]
        weights, biases = [], []
        for name, size, share in zip(names, n_out, shares, strict=True):
            shape, dim = ((n_in, size), 1) if is_transposed else ((size, n_in), 0)
            weights.append(Part(f"{name}.weight", shape, Shard(dim, share), is_transposed))
            biases.append(Part(f"{name}.bias", (size,), Shard(0, share)))
        weight = source.weight(weights, order)
        return cls(weight, source.joined(biases, order) if has_bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight(x, self.bias)  # [n_tokens, n_out of this rank]

    def record(self, to: Recorder, x: Buffer) -> Buffer:
        return to.multiply(self.weight, x, self.bias)


def read_gated(
    source: TensorSource,
    names: Sequence[str],
    *,
    n_in: int,
    size: int,
    gate: Gate,
    ops: Ops,
    has_bias: bool,
) -> GatedWeight:
    """Reads the projections `names`, of a gate and of what it gates, of `size` outputs each.

    A single name is that of a matrix that has both, one after the other. Returns this rank's share
    of both; with biases they are multiplied and gated one after the other.
    """
    op = ops.silu_and_mul if gate == "silu" else ops.gelu_and_mul
    firsts, n_stored = ((0, size), 2 * size) if len(names) == 1 else ((0, 0), size)
    names = [names[0], names[-1]]
    shares = []
    for name, first in zip(names, firsts, strict=True):
        share = even_share(size, source.tp_rank, source.tp_size, what=f"outputs of {name}")
        shares.append(range(first + share.start, first + share.stop))
    if has_bias:
        both = ColumnParallelLinear.read(
            source, names, n_in=n_in, n_out=(n_stored,) * 2, has_bias=True, shares=shares
        )
        return GatedInTwo(both.weight, gate, op, both.bias)
    parts = [
        Part(f"{name}.weight", (n_stored, n_in), Shard(0, share))
        for name, share in zip(names, shares, strict=True)
    ]
    return source.gated(parts, gate, op)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """`x @ weight.T + bias`, whole on every rank, where each has its share of the columns of `x`.

    Rank 0 alone has the `bias`, so that the sum over the ranks has it once.
    """

    weight: LinearWeight  # [n_out, n_in of this rank]
    bias: Tensor | None  # [n_out]

    @classmethod
    def read(
        cls,
        source: TensorSource,
        name: str,
        *,
        n_in: int,
        n_out: int,
        has_bias: bool,
        share: range | None = None,
        is_transposed: bool = False,
    ) -> Self:
        """Reads the projection `name`; `share` are this rank's inputs, by default an even part."""
        if share is None:
            share = even_share(n_in, source.tp_rank, source.tp_size, what=f"inputs of {name}")
        shape, dim = ((n_in, n_out), 0) if is_transposed else ((n_out, n_in), 1)
        weight = source.weight([Part(f"{name}.weight", shape, Shard(dim, share), is_transposed)])
        has_bias = has_bias and source.tp_rank == 0
        return cls(weight, source.tensor(f"{name}.bias", n_out) if has_bias else None)

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        """Returns [n_tokens, n_out], the same on every rank.

        A `residual` of that shape, the same on every rank, is added and used up.
        """
        if ranks.size == 1:
            return self.weight(x, self.bias, residual)  # [n_tokens, n_out]
        out = self.weight(x, self.bias)
        ranks.all_reduce(out)
        return out if residual is None else out.add_(residual)

    def record(self, to: Recorder, x: Buffer, residual: Buffer | None = None) -> Buffer:
        if to.tp_size == 1:
            return to.multiply(self.weight, x, self.bias, residual)
        out = to.multiply(self.weight, x, self.bias)
        to.all_reduce(out)
        return out if residual is None else to.add(residual, out)


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """This rank's rows of a table of tokens."""

    table: TableWeight  # [n_tokens of this rank, hidden]
    share: range  # which tokens these are
    vocab_size: int
    ops: Ops

    @classmethod
    def read(
        cls,
        source: TensorSource,
        name: str,
        *,
        vocab_size: int,
        hidden_size: int,
        ops: Ops,
        is_tied: bool = False,
    ) -> Self:
        """Reads this rank's rows of the table `name`; `is_tied` says that a head uses it too."""
        share = vocab_share(vocab_size, source.tp_rank, source.tp_size)
        part = Part(name, (vocab_size, hidden_size), Shard(0, share))
        table = source.table(part) if is_tied else source.rows(part)
        return cls(table, share, vocab_size, ops)

    def __call__(self, token_ids: Tensor, ranks: TensorParallel) -> Tensor:
        if ranks.size == 1:
            return self.table.rows(token_ids)  # [n_tokens, hidden]
        hidden = self._own_rows(token_ids)
        ranks.all_reduce(hidden)
        return hidden

    def record(self, to: Recorder) -> Buffer | None:
        """Returns the buffer of the batch's embedded tokens; None where ranks share the table."""
        if to.tp_size > 1:
            return None
        if isinstance(self.table, PlainWeight):
            return to.embed(self.table.weight)
        return to.embed_packed(self.table)

    def _own_rows(self, token_ids: Tensor) -> Tensor:
        """Returns [n_tokens, hidden], zeros for tokens of other ranks."""
        first = self.share.start
        if isinstance(self.table, PlainWeight):
            return self.ops.embedding(self.table.weight, token_ids, first)
        rows = token_ids - first
        is_elsewhere = (rows < 0) | (rows >= len(self.share))
        hidden = self.table.rows(rows.masked_fill(is_elsewhere, 0))
        return hidden.masked_fill_(is_elsewhere[:, None], 0)


@dataclass(frozen=True, slots=True)
class VocabParallelHead:
    """Computes the scores of all tokens, each on the rank that has the token's row."""

    weight: LinearWeight  # [n_tokens of this rank, hidden]
    share: range  # which tokens these are
    vocab_size: int

    @classmethod
    def read(cls, source: TensorSource, name: str, *, vocab_size: int, hidden_size: int) -> Self:
        """Reads this rank's rows of the matrix `name`, for a head that has one of its own."""
        share = vocab_share(vocab_size, source.tp_rank, source.tp_size)
        part = Part(name, (vocab_size, hidden_size), Shard(0, share))
        return cls(source.head(part), share, vocab_size)

    @classmethod
    def tied(cls, embedding: VocabParallelEmbedding) -> Self:
        """Returns the head whose matrix is the embedding's table."""
        return cls(embedding.table, embedding.share, embedding.vocab_size)

    def __call__(self, hidden: Tensor, ranks: TensorParallel) -> Tensor:
        """Returns logits [n, vocab_size] for `hidden` [n, hidden], the same on every rank."""
        logits = self.weight(hidden)  # [n, n_tokens of this rank]
        if ranks.size == 1:
            return logits
        n_missing = -(-self.vocab_size // ranks.size) - len(self.share)
        if n_missing:  # a gather takes equal parts; see vocab_share
            logits = F.pad(logits, (0, n_missing))
        return ranks.all_gather(logits)[:, : self.vocab_size]

    def record(self, to: Recorder, hidden: Buffer) -> Buffer | None:
        """Returns the buffer of the logits; None where ranks share the matrix."""
        return None if to.tp_size > 1 else to.multiply(self.weight, hidden)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square normalisation with a learned scale."""

    weight: Tensor  # [size], float32 or of the type of what it normalises
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)  # [..., size]

    def record(self, to: Recorder, x: Buffer) -> Buffer:
        return to.rms_norm(x, self.weight, self.eps)

    def record_parts(self, to: Recorder, x: Buffer, first: int, n: int) -> None:
        """Normalises `n` parts of each row of `x` side by side, from the element `first` on."""
        to.rms_norm_parts(x, first, self.weight, self.eps, n=n)
