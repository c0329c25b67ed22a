"""Steps that look up or copy rows, for example at the beginning of a program and of the head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.steps.buffer import Buffer
from kernels.weights.linear import TableWeight


@dataclass(frozen=True, slots=True)
class Embed:
    """Looks up the rows of tokens in a table."""

    table: Tensor  # [vocab_size, width]
    out: Buffer


@dataclass(frozen=True, slots=True)
class EmbedPacked:
    """Looks up the rows of tokens in a packed matrix, which may also be the matrix of the head."""

    table: TableWeight  # [vocab_size, width]
    out: Buffer


@dataclass(frozen=True, slots=True)
class EmbedShare:
    """Looks up the rows of tokens in a rank's share of a table. The result is zeros for tokens that
    belong to other ranks."""

    table: TableWeight  # [len(share), width]
    share: range  # the tokens whose rows the table has
    vocab_size: int  # number of rows of the shares of all ranks together
    is_open: bool  # whether tokens from `vocab_size` on are looked up as token 0
    out: Buffer


@dataclass(frozen=True, slots=True)
class AddPositions:
    """Adds to each token's row of `x` the row of `table` at the token's position, in place."""

    table: Tensor  # [n_positions, width]
    x: Buffer


@dataclass(frozen=True, slots=True)
class LookUpAngles:
    """Looks up the cosines and sines of one kind of rotary embedding at the tokens' positions."""

    rotary: int  # the index of the kind in `Program.rotaries`
    cos: Buffer
    sin: Buffer


@dataclass(frozen=True, slots=True)
class CopyPart:
    """Copies the elements `first : first + size` of each row of `x` to the elements `out_first :
    out_first + size` of the same row of `out`."""

    x: Buffer
    first: int
    size: int
    out: Buffer
    out_first: int


@dataclass(frozen=True, slots=True)
class Select:
    """Copies the rows of sampled tokens from `x` to `out`."""

    x: Buffer
    out: Buffer  # has rows of sampled tokens only, like the buffers of all later steps
