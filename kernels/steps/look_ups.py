"""Steps that begin a program or its head: they look up or copy whole rows."""

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
    """Looks up the rows of tokens in a matrix that is multiplied with, too."""

    table: TableWeight  # [vocab_size, width]
    out: Buffer


@dataclass(frozen=True, slots=True)
class EmbedShare:
    """Looks up the rows of tokens in a rank's share of a table; rows of other tokens are zeros."""

    table: TableWeight  # [len(share), width]
    share: range  # the tokens whose rows the table has
    vocab_size: int  # of the shares of all ranks
    is_open: bool  # whether tokens from `vocab_size` on are looked up as token 0
    out: Buffer


@dataclass(frozen=True, slots=True)
class AddPositions:
    """Adds the rows of positions in a table."""

    table: Tensor  # [n_positions, width]
    x: Buffer


@dataclass(frozen=True, slots=True)
class LookUpAngles:
    """Looks up the angles of positions, of one kind of rotary embedding."""

    rotary: int  # which kind
    cos: Buffer
    sin: Buffer


@dataclass(frozen=True, slots=True)
class CopyPart:
    """Copies `size` elements of each row, from the element `first` on, to a row of `out`."""

    x: Buffer
    first: int
    size: int
    out: Buffer
    out_first: int


@dataclass(frozen=True, slots=True)
class Select:
    """Copies the rows of sampled tokens."""

    x: Buffer
    out: Buffer  # of sampled tokens, as the buffers of all later steps
