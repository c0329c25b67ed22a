"""The K/V manager: accounts for who may store how much, and where (Orca, section 4.2).

A K/V slot holds one token's keys and values; a block is `block_size` slots. Memory is decided
here and only here: block ids are the same on every stage, ranks only store. A request reserves,
once, all the slots it can need in its life, so that no admitted request ever waits for memory
(the paper's guard against deadlock); a reservation is a count, and a block gets an owner only
when a token needs it.

A reservation also holds a row of the ranks' request tables, since it begins and ends with it. Where
layers keep a state of each request there are `max_rows` of them, and as many requests run.

With a prefix cache, a request begins with the blocks that the cache has of its tokens. A block that
several requests share is reserved once. One that nobody uses keeps its content until its memory is
needed, and is reserved by nobody: it counts as free. So the guarantee is the same, by the sum

    blocks in use + blocks that reservations may still ask for = reserved <= all,

since each block is either in use, or empty, or in the cache and can be evicted.

A batch that writes a block is always selected before one that reads it from the cache: blocks are
entered when a batch has been selected. Every stage runs batches in that order, however many are in
flight, so the content is there by then.
"""

from array import array

from services.scheduler.core.expected_use import ExpectedUse
from services.scheduler.core.prefix_cache import PrefixCache
from services.scheduler.core.request import Request
from services.scheduler.core.reservation import Reservation


class KVManager:
    """The accounts of all K/V memory: reserved <= n_blocks, and every block is free, in use, or
    kept by the prefix cache."""

    def __init__(
        self,
        *,
        n_blocks: int,
        block_size: int,
        has_prefix_cache: bool = False,
        expected_use: ExpectedUse | None = None,
        max_rows: int | None = None,
    ) -> None:
        """With `expected_use`, a request reserves what it may be expected to need instead of what
        it can need, and its reservation may have to grow."""
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"no K/V memory: {n_blocks} blocks of {block_size} slots")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.expected_use = expected_use
        self.max_rows = max_rows
        self.is_owing = False
        """Whether an admitted request waits for memory, so that none is admitted."""
        self.n_reserved_blocks = 0
        self.n_queried_tokens = 0
        """Tokens of admitted requests that were looked for in the prefix cache."""
        self.n_cached_tokens = 0
        """Tokens of these that were there, and so are not computed."""
        self.n_evicted_blocks = 0
        """Blocks that the prefix cache gave up, since others needed the memory."""
        self.prefix_cache: PrefixCache | None = None
        if has_prefix_cache:
            self.prefix_cache = PrefixCache(block_size=block_size)
        self._free_block_ids = array("I", range(n_blocks - 1, -1, -1))
        self._free_rows: list[int] = []
        self._n_rows = 0

    @property
    def n_slots(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def n_reserved_slots(self) -> int:
        return self.n_reserved_blocks * self.block_size

    @property
    def n_allocated_slots(self) -> int:
        """Slots of blocks that requests use."""
        n_idle = len(self._free_block_ids) + self._n_unused_blocks
        return (self.n_blocks - n_idle) * self.block_size

    @property
    def n_shared_slots(self) -> int:
        """Slots of blocks that several requests use."""
        return self.prefix_cache.n_shared_blocks * self.block_size if self.prefix_cache else 0

    @property
    def n_unused_slots(self) -> int:
        """Slots of blocks that the prefix cache keeps and no request uses."""
        return self._n_unused_blocks * self.block_size

    def fits_ever(self, max_sequence_len: int) -> bool:
        """Whether a request of `max_sequence_len` slots could run on an empty machine."""
        return self._blocks_for(max_sequence_len) <= self.n_blocks

    def reserve(self, request: Request) -> Reservation | None:
        """Reserves slots for the life of a request, or returns None if there are not enough.

        What the prefix cache has of its tokens counts as scheduled from then on.
        """
        if self.is_owing or not self._has_row:
            return None
        n_blocks = self._n_to_reserve(request)
        n_left = self.n_blocks - self.n_reserved_blocks
        cache = self._cache_for(request)
        if cache is None:
            if n_blocks > n_left:
                return None
            self.n_reserved_blocks += n_blocks
            return Reservation(row=self._take_row(), n_reserved_blocks=n_blocks)
        if n_blocks - request.n_tokens // self.block_size > n_left:
            return None  # not even if it shared all of them
        cached = cache.find(request)
        n_new = n_blocks - cache.n_in_use(cached)
        if n_new > n_left:
            return None
        self.n_reserved_blocks += n_new
        cache.take(cached)
        request.n_scheduled = len(cached) * self.block_size
        self.n_queried_tokens += request.n_tokens
        self.n_cached_tokens += request.n_scheduled
        return Reservation(
            row=self._take_row(),
            n_reserved_blocks=n_blocks,
            block_ids=cached,
            n_block_slots=request.n_scheduled,
            n_cached_blocks=len(cached),
            n_entered_blocks=len(cached),
            next_entry_at=(len(cached) + 1) * self.block_size,
        )

    def n_cached_blocks(self, request: Request) -> int:
        """Returns how many blocks of a request's beginning the prefix cache has."""
        cache = self._cache_for(request)
        return 0 if cache is None else len(cache.find(request))

    def n_missing_blocks(self, request: Request) -> int:
        """Returns how many blocks must become free before a request can be admitted; one at least
        where its row is missing, which becomes free with the blocks of another."""
        n_least = 0 if self._has_row else 1
        n_left = self.n_blocks - self.n_reserved_blocks
        n_missing = self._n_to_reserve(request) - n_left
        cache = self._cache_for(request)
        if n_missing <= 0 or cache is None:
            return max(n_least, n_missing)
        return max(n_least, n_missing - cache.n_in_use(cache.find(request)))

    def n_freed_blocks(self, reservation: Reservation, request: Request) -> int:
        """Returns how many blocks more there are for `request` when a reservation is released: not
        those that others use, nor those that are the request's own beginning."""
        cache = self._cache_for(request)
        n_freed = reservation.n_reserved_blocks
        if self.prefix_cache is not None:
            n_freed -= self.prefix_cache.n_shared(reservation.block_ids)
        if cache is not None:
            n_freed -= len({*cache.find(request)} & {*reservation.block_ids})
        return n_freed

    def has_room(self, reservation: Reservation, n_tokens: int) -> bool:
        """Returns whether a reservation is large enough to store `n_tokens` tokens."""
        return n_tokens <= reservation.n_reserved_blocks * self.block_size

    def n_free_slots(self, reservation: Reservation, n_tokens: int) -> int:
        """Returns how many tokens more than `n_tokens` a reservation is large enough for."""
        return reservation.n_reserved_blocks * self.block_size - n_tokens

    def grow(self, reservation: Reservation, n_tokens: int) -> bool:
        """Enlarges a reservation so that it is enough for `n_tokens` tokens, if there is memory
        for all of them; returns whether it is enough."""
        n_more = self._blocks_for(n_tokens) - reservation.n_reserved_blocks
        if n_more <= 0:
            return True
        if self.n_reserved_blocks + n_more > self.n_blocks:
            return False
        self.n_reserved_blocks += n_more
        reservation.n_reserved_blocks += n_more
        return True

    def allocate(self, reservation: Reservation, n_tokens: int) -> list[int]:
        """Gives the reservation the blocks it lacks to store `n_tokens` tokens, and returns their
        ids."""
        n_new = self._blocks_for(n_tokens) - len(reservation.block_ids)
        if n_new <= 0:
            return []
        if len(reservation.block_ids) + n_new > reservation.n_reserved_blocks:
            raise ValueError(f"{n_tokens} tokens exceed a reservation of {reservation}")
        new = [self._take_block() for _ in range(n_new)]
        reservation.block_ids += new
        reservation.n_block_slots += n_new * self.block_size
        return new

    def enter(self, request: Request, reservation: Reservation) -> None:
        """Enters the blocks into the prefix cache that are full with what is scheduled of a request
        and known."""
        n_stored = min(request.n_scheduled, request.n_tokens)
        if self.prefix_cache is None or n_stored < reservation.next_entry_at:
            return
        first, end = reservation.n_entered_blocks, n_stored // self.block_size
        evicted = self.prefix_cache.enter(request, reservation.block_ids, first=first, end=end)
        self._free_block_ids.extend(evicted)
        self.n_evicted_blocks += len(evicted)
        reservation.n_entered_blocks = end
        reservation.next_entry_at = (end + 1) * self.block_size

    def release(self, reservation: Reservation) -> None:
        """Takes back the blocks, the row and the reservation of a request."""
        self.n_reserved_blocks -= reservation.n_reserved_blocks - len(reservation.block_ids)
        cache = self.prefix_cache
        if cache is None:
            self.n_reserved_blocks -= len(reservation.block_ids)
            self._free_block_ids.extend(reversed(reservation.block_ids))
        else:
            # The last ones first: they are evicted in this order.
            for block_id in reversed(reservation.block_ids):
                if block_id not in cache:
                    self._free_block_ids.append(block_id)
                elif not cache.leave(block_id):
                    continue
                self.n_reserved_blocks -= 1
        self._free_rows.append(reservation.row)
        reservation.block_ids = []
        reservation.n_block_slots = 0
        reservation.n_reserved_blocks = 0

    def _n_to_reserve(self, request: Request) -> int:
        if self.expected_use is None:
            return self._blocks_for(request.max_sequence_len)
        return self._blocks_for(self.expected_use.n_tokens(request))

    def _cache_for(self, request: Request) -> PrefixCache | None:
        """Returns the prefix cache, if the request may find something in it."""
        if request.cache_scope is None or request.wants_prompt_logprobs:
            return None
        return self.prefix_cache

    @property
    def _n_unused_blocks(self) -> int:
        return 0 if self.prefix_cache is None else self.prefix_cache.n_unused

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _take_block(self) -> int:
        if self._free_block_ids or self.prefix_cache is None:
            return self._free_block_ids.pop()
        self.n_evicted_blocks += 1
        return self.prefix_cache.evict()

    @property
    def _has_row(self) -> bool:
        return self.max_rows is None or bool(self._free_rows) or self._n_rows < self.max_rows

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self._n_rows += 1
        return self._n_rows - 1
