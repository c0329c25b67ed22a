"""Linear layers, embeddings, heads and norms that model families share.

Each layer is an object that holds tensors of a checkpoint. Its method `describe` adds the
computation with these tensors as steps to a `kernels.program.Program`. A layer with a fused weight
(query, key and value; gate and up) reads the parts of the weight into one tensor, and each part is
divided among the ranks separately.

A layer that is divided among ranks (see `tensor_parallel.py`) holds this rank's share, and its
steps contain the collectives. Other layers are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kernels.program import Program
from kernels.steps import Buffer
from kernels.weights.gated_in_two import GatedInTwo, GatedMatrix
from kernels.weights.linear import Gate, LinearWeight, PlainWeight, TableWeight
from services.worker.models.tensor_parallel import even_share, vocab_share
from services.worker.models.weights import Part, Shard, TensorSource


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    """This rank's share of the outputs of `x @ weight.T + bias`. Every rank has all of `x`."""

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
        """Reads the projections `names`, of `n_out` outputs each, as one projection.

        `shares` are this rank's outputs of each projection, by default an even part. A name may
        occur several times with different shares, so that one stored matrix is read as several
        projections. With `is_transposed`, matrices are stored as [n_in, n_out]. `order` [n_out of
        this rank] gives, for each output, its index among the outputs that are read.
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

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds a step to a program, and returns the outputs of this rank, [n_tokens, n_out of this
        rank]."""
        return to.multiply(self.weight, x, self.bias)


def read_gated(
    source: TensorSource,
    names: Sequence[str],
    *,
    n_in: int,
    size: int,
    gate: Gate,
    has_bias: bool,
) -> GatedMatrix:
    """Reads the projections to gates and to the values that the gates multiply, `size` outputs
    each.

    `names` has the names of the two projections, or the name of a single matrix that holds both,
    one after the other. Returns this rank's share of both. Projections with biases are multiplied
    and gated in two operations.
    """
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
        return GatedInTwo(both.weight, gate, both.bias)
    parts = [
        Part(f"{name}.weight", (n_stored, n_in), Shard(0, share))
        for name, share in zip(names, shares, strict=True)
    ]
    return source.gated(parts, gate)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """`x @ weight.T + bias`, where each rank has a share of the columns of `x`.

    The products of the ranks are summed. Only rank 0 has the `bias`, so that the sum includes the
    bias once.
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
        """Reads the projection `name`; `share` is the range of this rank's inputs, by default an
        even part."""
        if share is None:
            share = even_share(n_in, source.tp_rank, source.tp_size, what=f"inputs of {name}")
        shape, dim = ((n_in, n_out), 0) if is_transposed else ((n_out, n_in), 1)
        weight = source.weight([Part(f"{name}.weight", shape, Shard(dim, share), is_transposed)])
        has_bias = has_bias and source.tp_rank == 0
        return cls(weight, source.tensor(f"{name}.bias", n_out) if has_bias else None)

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps of this layer to a program, and returns their result [n_tokens, n_out].
        All ranks get equal results.

        A `residual` of this shape, equal on every rank, is added and may be overwritten.
        """
        if to.tp_size == 1:
            return to.multiply(self.weight, x, self.bias, residual)
        out = to.all_reduce(to.multiply(self.weight, x, self.bias))
        return out if residual is None else to.add(residual, out)


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """This rank's rows of an embedding table, which has a row for each token."""

    table: TableWeight  # [n_tokens of this rank, hidden]
    share: range  # the tokens of these rows
    vocab_size: int

    @classmethod
    def read(
        cls,
        source: TensorSource,
        name: str,
        *,
        vocab_size: int,
        hidden_size: int,
        is_tied: bool = False,
    ) -> Self:
        """Reads this rank's rows of the table `name`. `is_tied` means that the head uses the table,
        too."""
        share = vocab_share(vocab_size, source.tp_rank, source.tp_size)
        part = Part(name, (vocab_size, hidden_size), Shard(0, share))
        table = source.table(part) if is_tied else source.rows(part)
        return cls(table, share, vocab_size)

    def describe(self, to: Program, *, is_open: bool = False) -> Buffer:
        """Adds the steps of this embedding to a program, and returns the table's rows for the
        batch's tokens, [n_tokens, hidden].

        With `is_open`, the batch may have token ids beyond the end of the table. Such tokens get
        the row of token 0.
        """
        if to.tp_size > 1 or is_open:
            share = to.embed_share(self.table, self.share, self.vocab_size, is_open=is_open)
            return to.all_reduce(share)
        if isinstance(self.table, PlainWeight):
            return to.embed(self.table.weight)
        return to.embed_packed(self.table)


@dataclass(frozen=True, slots=True)
class VocabParallelHead:
    """Computes the logits of all tokens of the vocabulary. Each rank computes the logits of its own
    part."""

    weight: LinearWeight  # [n_tokens of this rank, hidden]
    share: range  # the tokens of these rows
    vocab_size: int

    @classmethod
    def read(cls, source: TensorSource, name: str, *, vocab_size: int, hidden_size: int) -> Self:
        """Reads this rank's rows of the matrix `name`, for a head that has a matrix of its own."""
        share = vocab_share(vocab_size, source.tp_rank, source.tp_size)
        part = Part(name, (vocab_size, hidden_size), Shard(0, share))
        return cls(source.head(part), share, vocab_size)

    @classmethod
    def tied(cls, embedding: VocabParallelEmbedding) -> Self:
        """Returns a head that multiplies by the embedding's table."""
        return cls(embedding.table, embedding.share, embedding.vocab_size)

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        """Adds the steps of this head to a program, and returns the logits [n, vocab_size]. All
        ranks get equal results."""
        return to.all_gather(to.multiply(self.weight, hidden), self.vocab_size)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root-mean-square normalisation with a learned scale."""

    weight: Tensor  # [size], float32 or of the type of hidden states
    eps: float

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds a step to a program, and returns the normalised rows of `x`."""
        return to.rms_norm(x, self.weight, self.eps)

    def describe_parts(self, to: Program, x: Buffer, first: int, n: int) -> None:
        """Adds a step that normalises `n` adjacent vectors in each row of `x`, in place. The first
        vector begins at the element `first`."""
        to.rms_norm_parts(x, first, self.weight, self.eps, n=n)
