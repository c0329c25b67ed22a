"""The blocks of one K/V memory: which are free, and which one a request gets next."""

from array import array
from collections.abc import Sequence

from services.scheduler.core.memory.holder import Holder
from services.scheduler.core.memory.no_prefix_cache import NO_PREFIX_CACHE, NoPrefixCache
from services.scheduler.core.memory.prefix_cache import PrefixCache

Cache = PrefixCache | NoPrefixCache


class Blocks:
    """Every block is free, in use by requests, or kept by the prefix cache without a user."""

    def __init__(self, n_blocks: int, cache: Cache = NO_PREFIX_CACHE) -> None:
        self.n_blocks = n_blocks
        self.cache = cache
        self.n_evicted = 0
        """Blocks that the cache gave up since the memory was needed."""
        self._free = array("I", range(n_blocks - 1, -1, -1))

    @property
    def n_in_use(self) -> int:
        """Number of blocks that requests use."""
        return self.n_blocks - len(self._free) - self.cache.n_unused

    def cache_for(self, request: Holder) -> Cache:
        """Returns the prefix cache as a request sees it: none if the request may share nothing."""
        if request.cache_scope is None or request.wants_prompt_logprobs:
            return NO_PREFIX_CACHE
        return self.cache

    def take(self) -> int:
        """Returns a block for one request, free or else evicted from the cache; there must be
        one."""
        if self._free:
            return self._free.pop()
        self.n_evicted += 1
        return self.cache.evict()

    def give_back(self, block_id: int) -> bool:
        """Takes a block back from one of its users; returns whether that was the last one."""
        if block_id in self.cache:
            return self.cache.leave(block_id)
        self._free.append(block_id)
        return True

    def free(self, block_id: int) -> None:
        """Takes back a block that neither a request nor the cache has any more."""
        self._free.append(block_id)

    def free_evicted(self, block_ids: Sequence[int]) -> None:
        """Takes back blocks that the cache gave up for others of its entries."""
        self._free.extend(block_ids)
        self.n_evicted += len(block_ids)
