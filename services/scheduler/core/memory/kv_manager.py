"""The K/V manager: accounts of how much each request may store, and where (Orca, section 4.2).

A K/V slot holds one token's keys and values; a block is `block_size` slots. Memory is decided
here and only here: block ids are the same on every stage, ranks only store. A request reserves,
once, all the slots it can need in its life, so that no admitted request ever waits for memory
(the paper's guard against deadlock); a reservation is a count, and a block gets an owner only
when a token needs it.

A reservation also holds a row of the ranks' request tables, since it begins and ends with it.

What is optional is decided by other objects, and a memory without it has one that does nothing:

- Layers in several K/V groups (`kv_groups.py`). Blocks of all groups come out of one memory, and
  a request has as many columns of blocks, one block in each group, as its tokens need. In a group
  with a window a request gives blocks back as it goes on (`window_blocks.py`).
- The prefix cache (`prefix_cache.py`). A request begins with the blocks that the cache has of its
  tokens, and a block that several requests share is reserved once. A block without a user keeps
  its content until its memory is needed, is reserved by no request and counts as free.
- Optimistic admission (`expected_use.py`): a request reserves less than its whole life, and its
  reservation may have to grow.

With all of them the guarantee is the same, by the sum

    blocks in use + blocks that reservations may still ask for = reserved <= all,

since each block is in use, or empty, or in the cache and can be evicted. (In a group with a window
a reservation counts in full, whoever shares its blocks, so that the left side may be less.)
"""

from services.scheduler.core.memory.blocks import Blocks
from services.scheduler.core.memory.entries import Entries
from services.scheduler.core.memory.expected_use import ExpectedUse, WholeLife
from services.scheduler.core.memory.holder import Holder
from services.scheduler.core.memory.kv_groups import ONE_GROUP, BlockGroups
from services.scheduler.core.memory.no_prefix_cache import NO_PREFIX_CACHE, NoPrefixCache
from services.scheduler.core.memory.prefix_cache import PrefixCache
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.memory.rows import Rows
from services.scheduler.core.memory.window_blocks import window_blocks

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
        groups: BlockGroups = ONE_GROUP,
        has_prefix_cache: bool = False,
        expected_use: ExpectedUse | None = None,
        max_rows: int | None = None,
    ) -> None:
        """`n_blocks` is the number of blocks of all groups together. `expected_use` says what
        requests reserve; without it they reserve their whole lives. `max_rows` limits the requests
        that run, where layers keep a state of each."""
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"no K/V memory: {n_blocks} blocks of {block_size} slots")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.groups = groups
        self.expected_use = expected_use or WholeLife()
        self.is_owing = False
        """Whether an admitted request waits for memory, so that none is admitted."""
        self.n_reserved_blocks = 0
        cache: PrefixCache | NoPrefixCache = NO_PREFIX_CACHE
        if has_prefix_cache:
            cache = PrefixCache(block_size=block_size, groups=groups)
        self.blocks = Blocks(n_blocks, cache)
        self.rows = Rows(max_rows)
        entries = Entries(self.blocks, block_size=block_size, groups=groups)
        self.enter, self.enter_rest = entries.enter, entries.enter_rest

    def fits_ever(self, max_sequence_len: int) -> bool:
        """Returns whether a request of `max_sequence_len` slots could run on an empty machine, even
        if it were preempted before its last token."""
        n_columns = self.columns_for(max_sequence_len)
        return self.n_blocks_for(n_columns, max_sequence_len) <= self.n_blocks

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

    def reserve(self, request: Holder) -> Reservation | None:
        """Reserves slots for the life of a request, or returns None if there are not enough.

        What the prefix cache has of its tokens counts as scheduled from then on.
        """
        if self.is_owing or not self.rows.has_free:
            return None
        n_columns = self.columns_for(self.expected_use.n_tokens(request))
        n_left, cache = self.n_blocks - self.n_reserved_blocks, self.blocks.cache_for(request)
        if self.n_blocks_for(n_columns, 0) - cache.max_found_blocks(request) > n_left:
            return None  # not even if all its blocks were found: spares the search
        found = cache.find(request)
        n_unscheduled = request.n_tokens - found.n_columns * self.block_size
        n_blocks = self.n_blocks_for(n_columns, n_unscheduled)
        n_new = n_blocks - cache.n_in_use(found.block_ids)
        if n_new > n_left:
            return None
        self.n_reserved_blocks += n_new
        reservation = Reservation(self.rows.take(), n_blocks, n_columns, found.block_ids)
        if self.groups.finite:
            reservation.window_blocks = window_blocks(self.groups, found)
            reservation.n_at_once = self.groups.n_at_once(n_unscheduled)
        cache.take_found(request, found, reservation)
        return reservation

    def allocate(
        self, reservation: Reservation, n_tokens: int, *, start: int = 0, n_unscheduled: int = 0
    ) -> list[int]:
        """Gives the reservation the columns it lacks to store `n_tokens` tokens, and returns the
        ids of their blocks: the blocks of the first group, then of the second, and so on.

        The queries of the span begin at `start`, with `n_unscheduled` tokens of the prefill left
        there. What no query sees from there on is given back.
        """
        n_before = reservation.n_block_slots // self.block_size
        n_new = self.columns_for(n_tokens) - n_before
        if n_new <= 0:
            return []
        if n_before + n_new > reservation.n_reserved_columns:
            raise ValueError(f"{n_tokens} tokens exceed a reservation of {reservation}")
        new = self.blocks.take(n_new * self.groups.n_whole)
        reservation.block_ids += new
        reservation.n_block_slots += n_new * self.block_size
        if self.groups.n_whole > 1:
            new = self.groups.by_group(new)
        if reservation.window_blocks:
            self._move_windows(reservation, start, n_unscheduled)
            for window in reservation.window_blocks:
                new += window.extend(self.blocks.take(n_new))
        return new

    def blocks_of(self, reservation: Reservation) -> list[int]:
        """Returns the ids of all columns' blocks: the blocks of the first group, then of the
        second, and so on. There is 0 where a block has been given back."""
        block_ids = self.groups.by_group(reservation.block_ids)
        for window in reservation.window_blocks:
            block_ids += window.columns
        return block_ids

    def release(self, reservation: Reservation) -> None:
        """Takes back the blocks, the row and the reservation of a request."""
        self.n_reserved_blocks -= reservation.n_reserved_blocks - len(reservation.block_ids)
        # The last ones first: the prefix cache evicts them in this order.
        self.n_reserved_blocks -= self.blocks.give_back(reversed(reservation.block_ids))
        for window in reservation.window_blocks:
            self.blocks.give_back(reversed(window.block_ids))
        self.rows.give_back(reservation.row)
        reservation.clear()

    def retire(self, request: Holder, reservation: Reservation) -> None:
        """Releases the reservation of a request that is in no batch; the prefix cache keeps what is
        stored."""
        self.enter(request, reservation)
        self.enter_rest(request, reservation)
        self.release(reservation)

    def n_cached_columns(self, request: Holder) -> int:
        """Returns how many columns of a request's beginning the prefix cache has."""
        return self.blocks.cache_for(request).find(request).n_columns

    def has_room(self, reservation: Reservation, n_tokens: int) -> bool:
        """Returns whether a reservation is large enough to store `n_tokens` tokens."""
        return n_tokens <= reservation.n_reserved_columns * self.block_size

    def n_free_slots(self, reservation: Reservation, n_tokens: int) -> int:
        """Returns how many tokens more than `n_tokens` a reservation is large enough for."""
        return reservation.n_reserved_columns * self.block_size - n_tokens

    def grow(self, reservation: Reservation, n_tokens: int) -> bool:
        """Enlarges a reservation so that it is enough for `n_tokens` tokens, if there is memory
        for all of them; returns whether it is enough."""
        n_columns = self.columns_for(n_tokens)
        if n_columns <= reservation.n_reserved_columns:
            return True
        n_blocks = self.groups.n_blocks(
            n_columns, reservation.n_at_once, block_size=self.block_size
        )
        n_more = n_blocks - reservation.n_reserved_blocks
        if self.n_reserved_blocks + n_more > self.n_blocks:
            return False
        self.n_reserved_blocks += n_more
        reservation.n_reserved_blocks = n_blocks
        reservation.n_reserved_columns = n_columns
        return True

    @property
    def prefix_cache(self) -> PrefixCache | NoPrefixCache:
        """The contents of blocks that requests may share."""
        return self.blocks.cache

    @property
    def has_prefix_cache(self) -> bool:
        """Whether requests may share blocks."""
        return isinstance(self.blocks.cache, PrefixCache)

    @property
    def n_slots(self) -> int:
        """Tokens for which there are blocks in every group. Where there are windows, longer
        sequences find room."""
        return self._slots_of(self.n_blocks)

    @property
    def n_reserved_slots(self) -> int:
        """Slots of blocks that requests have reserved."""
        return self._slots_of(self.n_reserved_blocks)

    @property
    def n_allocated_blocks(self) -> int:
        """Blocks that requests use."""
        return self.blocks.n_in_use

    @property
    def n_allocated_slots(self) -> int:
        """Slots of blocks that requests use."""
        return self._slots_of(self.blocks.n_in_use)

    @property
    def n_shared_slots(self) -> int:
        """Slots of blocks that several requests use."""
        return self._slots_of(self.prefix_cache.n_shared_blocks)

    @property
    def n_unused_slots(self) -> int:
        """Slots of blocks that the prefix cache keeps and no request uses."""
        return self._slots_of(self.prefix_cache.n_unused)

    def n_blocks_for(self, n_columns: int, n_unscheduled: int) -> int:
        """Returns the blocks that a request of `n_columns` columns has at most, in all groups, if
        `n_unscheduled` tokens are not scheduled when it begins."""
        groups = self.groups
        if not groups.finite:  # nearly always: spares two calls
            return groups.n_whole * n_columns
        n_at_once = groups.n_at_once(n_unscheduled)
        return groups.n_blocks(n_columns, n_at_once, block_size=self.block_size)

    def columns_for(self, n_tokens: int) -> int:
        """Returns the columns of blocks that so many tokens need."""
        return -(-n_tokens // self.block_size)

    def _move_windows(self, reservation: Reservation, start: int, n_unscheduled: int) -> None:
        """Gives back the blocks that no query from `start` on sees, and what is reserved beyond
        what spans from now on can touch."""
        for window in reservation.window_blocks:
            self.blocks.give_back(window.pass_by(start, block_size=self.block_size))
        reservation.n_at_once = min(reservation.n_at_once, self.groups.n_at_once(n_unscheduled))
        n_blocks = self.groups.n_blocks(
            reservation.n_reserved_columns, reservation.n_at_once, block_size=self.block_size
        )
        self.n_reserved_blocks -= reservation.n_reserved_blocks - n_blocks
        reservation.n_reserved_blocks = n_blocks

    def _slots_of(self, n_blocks: int) -> int:
        """Returns the tokens that so many blocks have room for, an even part of them in each
        group."""
        return n_blocks * self.block_size // len(self.groups.windows)
