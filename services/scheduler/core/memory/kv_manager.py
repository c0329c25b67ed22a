"""The K/V manager: accounts for who may store how much, and where (Orca, section 4.2).

A K/V slot holds one token's keys and values; a block is `block_size` slots. Memory is decided
here and only here: block ids are the same on every stage, ranks only store. A request reserves,
once, all the slots it can need in its life, so that no admitted request ever waits for memory
(the paper's guard against deadlock); a reservation is a count, and a block gets an owner only
when a token needs it.

A reservation also holds a row of the ranks' request tables, since it begins and ends with it. Where
layers keep a state of each request there are `max_rows` of them, and as many requests run.

A model's layers may be in several groups (`kv_groups.py`). Blocks of all groups come out of one
memory, since they have as many bytes, and a request has as many columns of blocks as its tokens
need. In a group with a window it gives a block back when no query from now on sees any of it, and
reserves as many blocks as one span of its tokens can touch. Ranks run batches in their order, so a
block that is given back when a batch is selected may be written by a span of that very batch:
those that read it were selected before.

With a prefix cache, a request begins with the blocks that the cache has of its tokens. A block that
several requests share is reserved once. Behind them may be the rest of a request that has ended,
which is the new one's own from then on. One that nobody uses keeps its content until its memory is
needed, and is reserved by nobody: it counts as free. So the guarantee is the same, by the sum

    blocks in use + blocks that reservations may still ask for = reserved <= all,

since each block is either in use, or empty, or in the cache and can be evicted. In a group with a
window a reservation counts in full, whoever shares its blocks: when one of them goes on to a block
of its own, the other may keep the one that they shared. So the sum on the left may be less there.

A batch that writes a block is always selected before one that reads it from the cache: blocks are
entered when a batch has been selected. Every stage runs batches in that order, however many are in
flight, so the content is there by then.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice

from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import ONE_GROUP, KVGroups, first_seen
from services.scheduler.core.memory.prefix_cache import Found, PrefixCache
from services.scheduler.core.memory.reservation import Reservation, WindowBlocks
from services.scheduler.core.request import Request

MAX_SEQUENCE_LEN = 2**31 - 1
"""The longest sequence that any model has, in tokens."""


class KVManager:
    """The accounts of all K/V memory: reserved <= n_blocks, and every block is free, in use, or
    kept by the prefix cache."""

    def __init__(
        self,
        *,
        n_blocks: int,
        block_size: int,
        groups: KVGroups = ONE_GROUP,
        has_prefix_cache: bool = False,
        expected_use: ExpectedUse | None = None,
        max_rows: int | None = None,
    ) -> None:
        """`n_blocks` are those of all groups together. With `expected_use`, a request reserves what
        it may be expected to need instead of what it can need, and its reservation may have to
        grow."""
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"no K/V memory: {n_blocks} blocks of {block_size} slots")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.groups = groups
        self._n_whole = groups.n_whole
        self._n_groups = len(groups.windows)
        self._has_windows = bool(groups.finite)
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
            self.prefix_cache = PrefixCache(block_size=block_size, groups=groups)
        self._free_block_ids = array("I", range(n_blocks - 1, -1, -1))
        self._free_rows: list[int] = []
        self._n_rows = 0

    @property
    def n_allocated_blocks(self) -> int:
        """Blocks that requests use."""
        return self.n_blocks - len(self._free_block_ids) - self._n_unused_blocks

    @property
    def n_slots(self) -> int:
        """Tokens for which there are blocks in every group. Where there are windows, longer
        sequences find room."""
        return self._slots_of(self.n_blocks)

    @property
    def n_reserved_slots(self) -> int:
        return self._slots_of(self.n_reserved_blocks)

    @property
    def n_allocated_slots(self) -> int:
        """Slots of blocks that requests use."""
        return self._slots_of(self.n_allocated_blocks)

    @property
    def n_shared_slots(self) -> int:
        """Slots of blocks that several requests use."""
        return self._slots_of(self.prefix_cache.n_shared_blocks) if self.prefix_cache else 0

    @property
    def n_unused_slots(self) -> int:
        """Slots of blocks that the prefix cache keeps and no request uses."""
        return self._slots_of(self._n_unused_blocks)

    def fits_ever(self, max_sequence_len: int) -> bool:
        """Whether a request of `max_sequence_len` slots could run on an empty machine, even if it
        were put down before its last token."""
        n_columns = self._columns_for(max_sequence_len)
        return self._n_blocks_of(n_columns, self._n_at_once(max_sequence_len)) <= self.n_blocks

    @property
    def max_sequence_len(self) -> int:
        """The longest sequence that fits ever, in slots."""
        fits, too_long = 0, MAX_SEQUENCE_LEN + 1
        if self.fits_ever(MAX_SEQUENCE_LEN):
            return MAX_SEQUENCE_LEN
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if self.fits_ever(middle) else (fits, middle)
        return fits

    def reserve(self, request: Request) -> Reservation | None:
        """Reserves slots for the life of a request, or returns None if there are not enough.

        What the prefix cache has of its tokens counts as scheduled from then on.
        """
        if self.is_owing or not self._has_row:
            return None
        n_columns = self._n_to_reserve(request)
        n_left = self.n_blocks - self.n_reserved_blocks
        cache = self._cache_for(request)
        if cache is None:
            n_at_once = self._n_at_once(request.n_tokens)
            n_blocks = self._n_blocks_of(n_columns, n_at_once)
            if n_blocks > n_left:
                return None
            self.n_reserved_blocks += n_blocks
            return Reservation(
                self._take_row(),
                n_blocks,
                n_columns,
                window_blocks=self._window_blocks() if self._has_windows else (),
                n_at_once=n_at_once,
            )
        n_blocks = self._n_blocks_of(n_columns, self._n_at_once(0))
        if n_blocks - request.n_tokens // self.block_size * self._n_whole > n_left:
            return None  # not even if it shared all of them
        found = cache.find(request)
        n_cached, n_at_once = found.n_columns * self.block_size, 1
        if self._has_windows:
            n_at_once = self._n_at_once(request.n_tokens - n_cached)
            n_blocks = self._n_blocks_of(n_columns, n_at_once)
        n_new = n_blocks - cache.n_in_use(found.block_ids)
        if n_new > n_left:
            return None
        self.n_reserved_blocks += n_new
        cache.take(found.block_ids)
        for block_ids in found.window_block_ids:
            cache.take(block_ids)
        reservation = Reservation(
            self._take_row(),
            n_blocks,
            n_columns,
            block_ids=found.block_ids,
            window_blocks=self._window_blocks(found) if self._has_windows else (),
            n_at_once=n_at_once,
            n_block_slots=n_cached,
            n_cached_columns=found.n_columns,
            n_entered_columns=found.n_columns,
            next_entry_at=n_cached + self.block_size,
        )
        if found.rest is not None:
            cache.take_rest(found.rest.block_id)
            reservation.block_ids.append(found.rest.block_id)
            reservation.n_block_slots += self.block_size
            n_cached += found.rest.n_tokens
        request.n_scheduled = n_cached
        self.n_queried_tokens += request.n_tokens
        self.n_cached_tokens += n_cached
        return reservation

    def n_cached_columns(self, request: Request) -> int:
        """Returns how many columns of a request's beginning the prefix cache has."""
        cache = self._cache_for(request)
        return 0 if cache is None else cache.find(request).n_columns

    def n_missing_blocks(self, request: Request) -> int:
        """Returns how many blocks must become free before a request can be admitted; one at least
        where its row is missing, which becomes free with the blocks of another."""
        n_columns, n_left = self._n_to_reserve(request), self.n_blocks - self.n_reserved_blocks
        n_least = 0 if self._has_row else 1
        cache = self._cache_for(request)
        n_missing = self._n_blocks_of(n_columns, self._n_at_once(request.n_tokens)) - n_left
        if n_missing <= 0 or cache is None:
            return max(n_least, n_missing)
        found = cache.find(request)
        n_at_once = self._n_at_once(request.n_tokens - found.n_columns * self.block_size)
        n_missing = self._n_blocks_of(n_columns, n_at_once) - n_left
        return max(n_least, n_missing - cache.n_in_use(found.block_ids))

    def n_freed_blocks(self, reservation: Reservation, request: Request) -> int:
        """Returns how many blocks more there are for `request` when a reservation is released: not
        those that others use, nor those that are the request's own beginning."""
        cache = self._cache_for(request)
        n_freed = reservation.n_reserved_blocks
        if self.prefix_cache is not None:
            n_freed -= self.prefix_cache.n_shared(reservation.block_ids)
        if cache is not None:
            n_freed -= len({*cache.find(request).block_ids} & {*reservation.block_ids})
        return n_freed

    def has_room(self, reservation: Reservation, n_tokens: int) -> bool:
        """Returns whether a reservation is large enough to store `n_tokens` tokens."""
        return n_tokens <= reservation.n_reserved_columns * self.block_size

    def n_free_slots(self, reservation: Reservation, n_tokens: int) -> int:
        """Returns how many tokens more than `n_tokens` a reservation is large enough for."""
        return reservation.n_reserved_columns * self.block_size - n_tokens

    def grow(self, reservation: Reservation, n_tokens: int) -> bool:
        """Enlarges a reservation so that it is enough for `n_tokens` tokens, if there is memory
        for all of them; returns whether it is enough."""
        n_columns = self._columns_for(n_tokens)
        if n_columns <= reservation.n_reserved_columns:
            return True
        n_blocks = self._n_blocks_of(n_columns, reservation.n_at_once)
        n_more = n_blocks - reservation.n_reserved_blocks
        if self.n_reserved_blocks + n_more > self.n_blocks:
            return False
        self.n_reserved_blocks += n_more
        reservation.n_reserved_blocks = n_blocks
        reservation.n_reserved_columns = n_columns
        return True

    def allocate(
        self, reservation: Reservation, n_tokens: int, *, start: int = 0, n_unscheduled: int = 0
    ) -> list[int]:
        """Gives the reservation the columns it lacks to store `n_tokens` tokens, and returns the
        ids of their blocks: those of the first group, then of the second, and so on.

        The queries of the span begin at `start`, with `n_unscheduled` tokens of the prefill left
        there. What no query sees from there on is given back.
        """
        n_before = reservation.n_block_slots // self.block_size
        n_new = self._columns_for(n_tokens) - n_before
        if n_new <= 0:
            return []
        if n_before + n_new > reservation.n_reserved_columns:
            raise ValueError(f"{n_tokens} tokens exceed a reservation of {reservation}")
        new = [self._take_block() for _ in range(n_new * self._n_whole)]
        reservation.block_ids += new
        reservation.n_block_slots += n_new * self.block_size
        if self._n_whole > 1:
            new = self._by_group(new)
        if reservation.window_blocks:
            self._move_windows(reservation, start, n_unscheduled)
            for blocks in reservation.window_blocks:
                mine = [self._take_block() for _ in range(n_new)]
                blocks.block_ids.extend(mine)
                new += mine
        return new

    def blocks_of(self, reservation: Reservation) -> list[int]:
        """Returns the ids of all columns' blocks: those of the first group, then of the second, and
        so on. There is 0 where a block has been given back."""
        if self._n_groups == 1 and self._n_whole:
            return list(reservation.block_ids)
        block_ids = self._by_group(reservation.block_ids)
        for blocks in reservation.window_blocks:
            block_ids += [0] * blocks.first_column
            block_ids += blocks.block_ids
        return block_ids

    def enter(self, request: Request, reservation: Reservation) -> None:
        """Enters the blocks into the prefix cache that are full with what is scheduled of a request
        and known."""
        n_stored = min(request.n_scheduled, request.n_tokens)
        cache = self.prefix_cache
        if cache is None or n_stored < reservation.next_entry_at:
            return
        first, end, n_whole = (
            reservation.n_entered_columns,
            n_stored // self.block_size,
            self._n_whole,
        )
        evicted: list[int] = []
        for group in range(n_whole):
            block_ids = reservation.block_ids[first * n_whole + group : end * n_whole : n_whole]
            evicted += cache.enter(request, block_ids, first=first, group=group)
        for group, blocks in enumerate(reservation.window_blocks, n_whole):
            held, gone = max(first, blocks.first_column), blocks.first_column
            if held < end:
                block_ids = list(islice(blocks.block_ids, held - gone, end - gone))
                evicted += cache.enter(request, block_ids, first=held, group=group)
        self._free_block_ids.extend(evicted)
        self.n_evicted_blocks += len(evicted)
        reservation.n_entered_columns = end
        reservation.next_entry_at = (end + 1) * self.block_size

    def enter_rest(self, request: Request, reservation: Reservation) -> None:
        """Enters the last block of a request that is in no batch and about to be released, as far
        as it is full with what is known."""
        cache = self._cache_for(request)
        column, n_tokens = divmod(min(request.n_scheduled, request.n_tokens), self.block_size)
        if cache is None or self._n_groups > 1 or not (self._n_whole and column and n_tokens):
            return
        block_id = reservation.block_ids[column]
        replaced = cache.enter_rest(request, block_id, column=column, n_tokens=n_tokens)
        if replaced is not None:
            self._free_block_ids.append(replaced)

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
        for blocks in reservation.window_blocks:
            for block_id in reversed(blocks.block_ids):
                self._give_back(block_id)
        self._free_rows.append(reservation.row)
        reservation.block_ids = []
        reservation.window_blocks = ()
        reservation.n_block_slots = 0
        reservation.n_reserved_blocks = reservation.n_reserved_columns = 0

    def _move_windows(self, reservation: Reservation, start: int, n_unscheduled: int) -> None:
        """Gives back the blocks that no query from `start` on sees, and what is reserved beyond
        what spans from now on can touch."""
        for blocks in reservation.window_blocks:
            first = first_seen(start, blocks.window) // self.block_size
            while blocks.first_column < first and blocks.block_ids:
                self._give_back(blocks.block_ids.popleft())
                blocks.first_column += 1
        reservation.n_at_once = min(reservation.n_at_once, self._n_at_once(n_unscheduled))
        n_blocks = self._n_blocks_of(reservation.n_reserved_columns, reservation.n_at_once)
        self.n_reserved_blocks -= reservation.n_reserved_blocks - n_blocks
        reservation.n_reserved_blocks = n_blocks

    def _by_group(self, block_ids: list[int]) -> list[int]:
        """Returns blocks of whole columns in the order of their groups."""
        n = self._n_whole
        return [block_id for place in range(n) for block_id in block_ids[place::n]]

    def _give_back(self, block_id: int) -> None:
        """Takes a block back from one of its users."""
        if self.prefix_cache is None or block_id not in self.prefix_cache:
            self._free_block_ids.append(block_id)
        else:
            self.prefix_cache.leave(block_id)

    def _window_blocks(self, found: Found | None = None) -> Sequence[WindowBlocks]:
        """Returns what a request holds in each group with a window when it is admitted."""
        windows = self.groups.finite
        if found is None:
            return tuple([WindowBlocks(window) for window in windows])
        return tuple(
            WindowBlocks(window, found.n_columns - len(block_ids), deque(block_ids))
            for window, block_ids in zip(windows, found.window_block_ids, strict=True)
        )

    def _slots_of(self, n_blocks: int) -> int:
        """Returns the tokens that so many blocks have room for, an even part of them in each
        group."""
        return n_blocks * self.block_size // self._n_groups

    def _n_to_reserve(self, request: Request) -> int:
        """Returns the columns that a request reserves."""
        if self.expected_use is None:
            return self._columns_for(request.max_sequence_len)
        return self._columns_for(self.expected_use.n_tokens(request))

    def _n_at_once(self, n_unscheduled: int) -> int:
        return self.groups.n_at_once(n_unscheduled) if self._has_windows else 1

    def _n_blocks_of(self, n_columns: int, n_at_once: int) -> int:
        """Returns the blocks of a request with so many columns at most, in all groups."""
        if not self._has_windows:
            return self._n_whole * n_columns
        return self.groups.n_blocks(n_columns, n_at_once, block_size=self.block_size)

    def _cache_for(self, request: Request) -> PrefixCache | None:
        """Returns the prefix cache, if the request may find something in it."""
        if request.cache_scope is None or request.wants_prompt_logprobs:
            return None
        return self.prefix_cache

    @property
    def _n_unused_blocks(self) -> int:
        return 0 if self.prefix_cache is None else self.prefix_cache.n_unused

    def _columns_for(self, n_tokens: int) -> int:
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
