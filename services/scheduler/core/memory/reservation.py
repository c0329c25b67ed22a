"""The memory that one admitted request holds on the ranks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.memory.window_blocks import WindowBlocks


@dataclass(slots=True, eq=False)
class Reservation:
    """The row and the blocks that one request holds. The request never has more blocks than it has
    reserved."""

    row: int
    n_reserved_blocks: int
    n_reserved_columns: int
    block_ids: list[int] = field(default_factory=list)
    """Blocks of the K/V groups that see all tokens, column by column."""
    window_blocks: Sequence[WindowBlocks] = ()
    """The blocks of each K/V group with a window."""
    n_at_once: int = 1
    """Largest number of tokens that a span of the request may have, if the model has attention
    windows: enough blocks are reserved for such spans."""
    n_block_slots: int = 0
    """Number of slots in the allocated columns, kept so that a decode need not multiply."""
    n_cached_columns: int = 0
    """Number of columns of the prompt that were found in the prefix cache when the reservation was
    made. A column is one block in each K/V group."""
    n_entered_columns: int = 0
    """Number of columns of the request that have been entered into the prefix cache."""
    next_entry_at: int = sys.maxsize
    """Number of stored tokens at which another column of the request can be entered into the prefix
    cache. Without a prefix cache this number is never reached."""

    def clear(self) -> None:
        """Empties the reservation, because other requests may get its blocks from now on."""
        self.block_ids = []
        self.window_blocks = ()
        self.n_block_slots = self.n_reserved_blocks = self.n_reserved_columns = 0
