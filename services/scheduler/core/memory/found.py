"""Results of a search in the prefix cache for the tokens of a request."""

from collections.abc import Sequence
from typing import NamedTuple


class Rest(NamedTuple):
    """The last, partly filled block of an ended request, and the tokens in the block."""

    block_id: int
    n_tokens: int
    packed: bytes


class Found(NamedTuple):
    """The blocks of the longest beginning of a request's sequence that is in the prefix cache."""

    n_columns: int
    block_ids: list[int]
    """Blocks of the K/V groups that see all tokens, column by column."""
    window_block_ids: Sequence[Sequence[int]] = ()
    """For each K/V group with a window, the blocks of the last columns that the next token sees.
    Empty if no block is found."""
    rest: Rest | None = None
    """The partly filled block after the found columns. The request may continue to fill it. None if
    no such block was found, or if the model has several K/V groups or a window."""
