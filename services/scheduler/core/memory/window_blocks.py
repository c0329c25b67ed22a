"""The blocks of a request in a K/V group with a window.

The layers of such a group read only the last tokens of a sequence. So a request gives a block back
when no later query sees any token of the block, and reserves as many blocks as one span of tokens
can touch. Ranks run batches in the order of selection. So a block that is given back when a batch
is selected may be written again by that same batch: all spans that read the block were selected
earlier.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.memory.found import Found
from services.scheduler.core.memory.kv_groups import BlockGroups, first_seen


@dataclass(slots=True, eq=False)
class WindowBlocks:
    """The blocks of a request's last columns in one K/V group with a window."""

    window: int
    first_column: int = 0
    """Index of the column of the first block held; the blocks of earlier columns have been given
    back."""
    block_ids: deque[int] = field(default_factory=deque)

    @property
    def columns(self) -> list[int]:
        """Ids of the blocks of all columns, or 0 where a block has been given back."""
        return [0] * self.first_column + list(self.block_ids)

    def extend(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Appends the ids of the blocks of the sequence's next columns, and returns them."""
        self.block_ids.extend(block_ids)
        return block_ids

    def pass_by(self, position: int, *, block_size: int) -> Iterator[int]:
        """Removes the blocks that no query from `position` on can see, and yields their ids."""
        first = first_seen(position, self.window) // block_size
        while self.first_column < first and self.block_ids:
            yield self.block_ids.popleft()
            self.first_column += 1


def window_blocks(groups: BlockGroups, found: Found) -> Sequence[WindowBlocks]:
    """Returns the blocks that a newly admitted request holds in each K/V group with a window."""
    if not found.window_block_ids:
        return tuple([WindowBlocks(window) for window in groups.finite])
    return tuple(
        WindowBlocks(window, found.n_columns - len(block_ids), deque(block_ids))
        for window, block_ids in zip(groups.finite, found.window_block_ids, strict=True)
    )
