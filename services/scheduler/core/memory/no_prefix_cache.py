"""Replacement for the prefix cache if there is none, and for requests that may share no blocks."""

from collections.abc import Sequence

from services.scheduler.core.memory.entry_changes import NO_CHANGES, Changes
from services.scheduler.core.memory.found import Found
from services.scheduler.core.memory.holder import Holder
from services.scheduler.core.memory.reservation import Reservation


class NoPrefixCache:
    """A prefix cache that is always empty."""

    n_unused = n_shared_blocks = n_queried_tokens = n_cached_tokens = 0

    def __len__(self) -> int:
        """Returns 0: no block is in the cache."""
        return 0

    def __contains__(self, block_id: int) -> bool:
        return False

    def find(self, request: Holder) -> Found:
        """Returns a result without blocks."""
        return Found(0, [])

    def n_columns(self, request: Holder) -> int:
        """Returns 0, the number of columns of blocks that `find` returns."""
        return 0

    def max_found_blocks(self, request: Holder) -> int:
        """Returns 0, the largest number of blocks that `find` returns."""
        return 0

    def n_in_use(self, block_ids: Sequence[int]) -> int:
        """Returns 0: no block is in the cache."""
        return 0

    def n_shared(self, block_ids: Sequence[int]) -> int:
        """Returns 0: no block is in the cache."""
        return 0

    def take_found(self, request: Holder, found: Found, reservation: Reservation) -> None:
        """Does nothing, because no blocks were found."""

    def leave(self, block_id: int) -> bool:
        """Raises KeyError, because no block is in the cache."""
        raise KeyError(block_id)

    def forget(self, request: Holder, *, first: int = 0) -> list[int]:
        """Returns an empty list: no block is in the cache."""
        return []

    def begin_count(self) -> None:
        """Does nothing: no tokens are counted."""

    def record_changes(self) -> None:
        """Does nothing: there are no entries."""

    def take_changes(self) -> Changes:
        """Returns no changes."""
        return NO_CHANGES

    def limit(self, max_blocks: int) -> list[int]:
        """Returns an empty list: no block is in the cache."""
        return []

    def evict(self) -> int:
        """Raises RuntimeError, because an empty cache has no block to evict. This happens only if
        requests have reserved more blocks than there are."""
        raise RuntimeError("no K/V block is free")


NO_PREFIX_CACHE = NoPrefixCache()
