"""The per-layer inputs of Gemma 3n and 4: each layer receives an additional vector for each token.

The first stage computes these vectors for all layers, from the token's row in a second embedding
table and from the token's embedding. The vectors are appended to the row of hidden states of the
token, so that every stage receives them: [n_tokens, residual stream, inputs of layer 0, of layer 1,
...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kernels.program import Program
from kernels.steps import Buffer
from kernels.weights.linear import LinearWeight
from services.worker.models.decoder_layers import Head, Norm
from services.worker.models.layers import RMSNorm, VocabParallelEmbedding
from services.worker.models.weights import Part, TensorSource


def whole_weight(source: TensorSource, name: str, n_out: int, n_in: int) -> LinearWeight:
    """Reads the matrix `{name}.weight` [n_out, n_in] without dividing it among the ranks.

    The matrix is small: summing partial products over the ranks would take longer than computing
    the whole product.
    """
    return source.weight([Part(f"{name}.weight", (n_out, n_in))])


@dataclass(frozen=True, slots=True)
class PerLayerTable:
    """Computes the per-layer inputs of all layers."""

    table: VocabParallelEmbedding  # [n_tokens, n_layers * size]
    table_factor: float
    projection: LinearWeight  # [n_layers * size, hidden]
    projection_factor: float
    norm: RMSNorm  # of one layer's inputs
    size: int  # of one layer's inputs

    def describe(self, to: Program, embedded: Buffer) -> Buffer:
        """Adds the steps of this table to a program, and returns the per-layer inputs, [n_tokens,
        n_layers * size], of `embedded` [n_tokens, hidden].

        Tokens beyond the end of the table have the inputs of token 0.
        """
        rows = to.scale(self.table.describe(to, is_open=True), self.table_factor)
        projected = to.scale(to.multiply(self.projection, embedded), self.projection_factor)
        self.norm.describe_parts(to, projected, 0, projected.width // self.size)
        return to.scale(to.add(projected, rows), 2**-0.5)


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """Multiplies the per-layer inputs of one layer by gates. The gates are computed from the hidden
    states."""

    gate: LinearWeight  # [size, hidden]
    projection: LinearWeight  # [hidden, size]
    norm: Norm
    begin: int  # the layer's inputs begin at this element of a row

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        *,
        hidden_size: int,
        size: int,
        begin: int,
        norm: Norm,
    ) -> Self:
        """Reads both matrices under `prefix`. `begin` is the index of the layer's inputs in a row
        of hidden states."""
        return cls(
            whole_weight(source, f"{prefix}.per_layer_input_gate", size, hidden_size),
            whole_weight(source, f"{prefix}.per_layer_projection", hidden_size, size),
            norm,
            begin,
        )

    def describe(self, to: Program, hidden: Buffer, rows: Buffer) -> Buffer:
        """Adds the steps of this gate to a program, and returns the gated inputs projected to
        [n_tokens, hidden].

        The gates are computed from `hidden` [n_tokens, hidden]. `rows` are the complete rows, which
        contain the inputs of the layer.
        """
        gates = to.activate("gelu_tanh", to.multiply(self.gate, hidden))
        gated = to.mul(gates, rows, self.begin)
        return self.norm.describe(to, to.multiply(self.projection, gated))


@dataclass(frozen=True, slots=True)
class HeadWithoutInputs:
    """A head that ignores the per-layer inputs: it reads only the residual stream, the first `size`
    elements of a row."""

    head: Head
    size: int

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        return self.head.describe(to, to.take_part(hidden, 0, self.size))
