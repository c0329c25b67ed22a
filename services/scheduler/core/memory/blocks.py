"""The blocks of one K/V memory: which are free, and which one a request gets next."""

from array import array
from collections.abc import Iterable, Sequence

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

    def take(self, n_blocks: int) -> list[int]:
        """Returns blocks for one request, free or else evicted from the cache; there must be as
        many."""
        free = self._free
        if n_blocks == 1 and free:  # nearly always: a third of the time
            return [free.pop()]
        return [free.pop() if free else self._evict() for _ in range(n_blocks)]

    def give_back(self, block_ids: Iterable[int]) -> int:
        """Takes blocks back from one of the users of each; returns how many have no user now."""
        n_unused, cache, free = 0, self.cache, self._free
        for block_id in block_ids:
            if block_id in cache:
                n_unused += cache.leave(block_id)
            else:
                free.append(block_id)
                n_unused += 1
        return n_unused

    def _evict(self) -> int:
        self.n_evicted += 1
        return self.cache.evict()

    def free(self, block_id: int) -> None:
        """Takes back a block that neither a request nor the cache has any more."""
        self._free.append(block_id)

    def free_evicted(self, block_ids: Sequence[int]) -> None:
        """Takes back blocks that the cache gave up for others of its entries."""
        self._free.extend(block_ids)
        self.n_evicted += len(block_ids)
