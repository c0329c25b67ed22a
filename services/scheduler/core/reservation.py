"""The memory that one admitted request holds on the ranks."""

import sys
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Reservation:
    """The row and the blocks that one request holds; never more blocks than were reserved."""

    row: int
    n_reserved_blocks: int
    block_ids: list[int] = field(default_factory=list)
    n_block_slots: int = 0
    """Slots of its blocks, so that each decode need not multiply."""
    n_cached_blocks: int = 0
    """Blocks at its beginning that were in the prefix cache when it was made."""
    n_entered_blocks: int = 0
    """Blocks whose content the prefix cache has been told of, those from there included."""
    next_entry_at: int = sys.maxsize
    """Stored tokens with which there is another block to enter; none is where nothing is cached."""
