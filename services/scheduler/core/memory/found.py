"""What the prefix cache has found for a request."""

from collections.abc import Sequence
from typing import NamedTuple


class Rest(NamedTuple):
    """The last block of a request that has ended, which is not full, and the tokens in it."""

    block_id: int
    n_tokens: int
    packed: bytes


class Found(NamedTuple):
    """The blocks of the longest beginning of a request that is in the cache."""

    n_columns: int
    block_ids: list[int]
    """Blocks of the groups that see everything, column by column."""
    window_block_ids: Sequence[Sequence[int]] = ()
    """For each group with a window, the blocks of the last columns; empty where nothing is found.
    """
    rest: Rest | None = None
    """The block after these columns that the request may go on to fill, where there is one group
    that sees everything."""
