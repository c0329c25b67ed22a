"""The prefix cache where there is none, and for requests that share nothing."""

from collections.abc import Sequence

from services.scheduler.core.memory.found import Found
from services.scheduler.core.memory.holder import Holder
from services.scheduler.core.memory.reservation import Reservation


class NoPrefixCache:
    """A prefix cache that holds nothing and takes nothing in."""

    n_unused = n_shared_blocks = n_queried_tokens = n_cached_tokens = 0

    def __contains__(self, block_id: int) -> bool:
        return False

    def find(self, request: Holder) -> Found:
        """Finds nothing."""
        return Found(0, [])

    def max_found_blocks(self, request: Holder) -> int:
        """Returns the number of blocks that `find` returns at most."""
        return 0

    def n_in_use(self, block_ids: Sequence[int]) -> int:
        """Returns how many of the blocks that were found, none, are in use."""
        return 0

    def n_shared(self, block_ids: Sequence[int]) -> int:
        """Returns how many blocks have several users."""
        return 0

    def take_found(self, request: Holder, found: Found, reservation: Reservation) -> None:
        """Makes a request a user of the blocks that were found, which are none."""

    def leave(self, block_id: int) -> bool:
        """Raises KeyError, since no block is here."""
        raise KeyError(block_id)

    def evict(self) -> int:
        """Raises RuntimeError: there is no block to give up, so requests have reserved too many."""
        raise RuntimeError("no K/V block is free")


NO_PREFIX_CACHE = NoPrefixCache()
