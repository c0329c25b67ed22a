"""The memory that one admitted request holds on the ranks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.memory.window_blocks import WindowBlocks


@dataclass(slots=True, eq=False)
class Reservation:
    """The row and the blocks that one request holds; never more blocks than were reserved."""

    row: int
    n_reserved_blocks: int
    n_reserved_columns: int
    block_ids: list[int] = field(default_factory=list)
    """Blocks of the groups that see everything, column by column."""
    window_blocks: Sequence[WindowBlocks] = ()
    """The blocks of each group with a window."""
    n_at_once: int = 1
    """Tokens of a span at most for which it is reserved, where there are windows."""
    n_block_slots: int = 0
    """Slots of its columns, so that each decode need not multiply."""
    n_cached_columns: int = 0
    """Columns at its beginning that were in the prefix cache when it was made."""
    n_entered_columns: int = 0
    """Columns that the prefix cache has been told of."""
    next_entry_at: int = sys.maxsize
    """Stored tokens with which there is another column to enter; none is where nothing is cached.
    """

    def clear(self) -> None:
        """Forgets the blocks, which other requests may have from now on."""
        self.block_ids = []
        self.window_blocks = ()
        self.n_block_slots = self.n_reserved_blocks = self.n_reserved_columns = 0
