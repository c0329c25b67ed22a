"""The blocks of one K/V memory: which blocks are free, and which block a request gets next."""

from array import array
from collections.abc import Iterable, Sequence

from services.scheduler.core.memory.holder import Holder
from services.scheduler.core.memory.no_prefix_cache import NO_PREFIX_CACHE, NoPrefixCache
from services.scheduler.core.memory.prefix_cache import PrefixCache

Cache = PrefixCache | NoPrefixCache


class Blocks:
    """Assigns the blocks of one K/V memory to requests. Each block is free, in use by requests (its
    users), or kept by the prefix cache without a user."""

    def __init__(self, n_blocks: int, cache: Cache = NO_PREFIX_CACHE) -> None:
        self.n_blocks = n_blocks
        self.cache = cache
        self.n_evicted = 0
        """Number of blocks that were evicted from the prefix cache."""
        self._free = array("I", range(n_blocks - 1, -1, -1))

    @property
    def n_in_use(self) -> int:
        """Number of blocks that requests use."""
        return self.n_blocks - len(self._free) - self.cache.n_unused

    def cache_for(self, request: Holder) -> Cache:
        """Returns the prefix cache that a request may use: a cache that is always empty if the
        request may not share blocks."""
        if request.cache_scope is None or request.wants_prompt_logprobs:
            return NO_PREFIX_CACHE
        return self.cache

    def take(self, n_blocks: int) -> list[int]:
        """Returns ids of `n_blocks` blocks for one request: free blocks first, then blocks evicted
        from the prefix cache. At least `n_blocks` blocks must be free or evictable."""
        free = self._free
        if n_blocks == 1 and free:  # the usual case, which takes a third of the time this way
            return [free.pop()]
        return [free.pop() if free else self._evict() for _ in range(n_blocks)]

    def give_back(self, block_ids: Iterable[int]) -> int:
        """Removes one user from each of the given blocks. Returns the number of these blocks that
        have no user now."""
        n_unused, cache, free = 0, self.cache, self._free
        for block_id in block_ids:
            if block_id in cache:
                if not cache.leave(block_id):
                    continue
                if block_id not in cache:  # a block that the cache forgot while it was in use
                    free.append(block_id)
            else:
                free.append(block_id)
            n_unused += 1
        return n_unused

    def forget(self, request: Holder, *, first: int = 0) -> None:
        """Makes the prefix cache forget all blocks of a request's sequence whose index in the
        sequence is `first` or higher."""
        self._free.extend(self.cache.forget(request, first=first))

    def take_over(self, earlier: "Blocks") -> None:
        """Takes over the cached and free blocks of an earlier epoch. `earlier` must not be used any
        more. Raises ValueError if any block is in use, here or in `earlier`."""
        if self.n_in_use or earlier.n_in_use:
            raise ValueError(f"{self.n_in_use} and {earlier.n_in_use} blocks are in use")
        self.cache, self._free = earlier.cache, earlier._free
        self.cache.begin_count()

    def restore(self, entries: Iterable[tuple[int, bytes]], *, secret: bytes) -> None:
        """Fills the prefix cache with entries of an earlier leader (`PrefixCache.restore`), whose
        keys were made with `secret`. Leaves out blocks that this memory does not have. No block may
        be in use or in the cache. Does nothing if there is no prefix cache."""
        if isinstance(self.cache, PrefixCache):
            self.cache.use_secret(secret)
            self.cache.restore(it for it in entries if it[0] < self.n_blocks)
            self._free = array("I", [it for it in self._free if it not in self.cache])

    def _evict(self) -> int:
        self.n_evicted += 1
        return self.cache.evict()

    def limit_cache(self, max_blocks: int) -> None:
        """Sets the largest number of blocks in the prefix cache. Evicts and frees unused blocks if
        the cache has more."""
        self.free_evicted(self.cache.limit(max_blocks))

    def free(self, block_id: int) -> None:
        """Frees a block that is used by no request and is not in the prefix cache."""
        self._free.append(block_id)

    def free_evicted(self, block_ids: Sequence[int]) -> None:
        """Frees blocks that were evicted from the prefix cache to make room for other entries."""
        self._free.extend(block_ids)
        self.n_evicted += len(block_ids)
