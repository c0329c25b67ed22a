"""The K/V manager: keeps account of how much K/V memory each request may use, and in which blocks
(Orca, section 4.2).

A K/V slot holds one token's keys and values; a block is `block_size` slots. All decisions about K/V
memory are made here: block ids are the same on every stage, and ranks only store. A request
reserves, once, all the slots that it can need in its life, so that no admitted request ever waits
for memory (the paper's guard against deadlock). A reservation is a number; a block is assigned to a
request only when a token needs the block.

A reservation also includes a row of the ranks' request tables. The row is taken and freed together
with the memory.

Optional features are implemented by other objects, and where a feature is off, an object that does
nothing takes its place:

- Layers in several K/V groups (`kv_groups.py`). Blocks of all groups come from one memory. A
  request has as many columns of blocks as its tokens need, and a column has one block in each
  group. In a group with a window, a request gives blocks back while it runs (`window_blocks.py`).
- The prefix cache (`prefix_cache.py`). A request begins with the cached blocks that hold its first
  tokens, and a block that several requests share is reserved once. A block without a user keeps
  its content until the memory is needed. Such a block is reserved by no request and counts as free.
- Optimistic admission (`expected_use.py`). A request reserves less than its whole life may need,
  so its reservation may have to grow.

With all of these features the guarantee stays the same, by the sum

    blocks in use + blocks that reservations may still ask for = reserved <= all,

since each block is in use, or empty, or in the cache and can be evicted. (In a group with a window
a reservation counts in full even if other requests share its blocks, so that the left side may be
less.)
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
"""Upper limit for the length of a sequence of any model, in tokens."""


class KVManager:
    """Keeps account of the K/V memory of a pipeline. Never more than `n_blocks` blocks are
    reserved, and every block is free, in use, or kept by the prefix cache."""

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
        """`n_blocks` is the number of blocks of all groups together. `expected_use` determines how
        much requests reserve. Without it, requests reserve memory for their longest possible
        sequences. `max_rows` limits the number of running requests where layers keep a state for
        each request."""
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"no K/V memory: {n_blocks} blocks of {block_size} slots")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.groups = groups
        self.expected_use = expected_use or WholeLife()
        self.is_owing = False
        """Whether an admitted request waits for memory; no other request is admitted meanwhile."""
        self.n_reserved_blocks = 0
        cache: PrefixCache | NoPrefixCache = NO_PREFIX_CACHE
        if has_prefix_cache:
            cache = PrefixCache(block_size=block_size, groups=groups)
        self.blocks = Blocks(n_blocks, cache)
        self.rows = Rows(max_rows)
        entries = Entries(self.blocks, block_size=block_size, groups=groups)
        self.enter, self.enter_rest = entries.enter, entries.enter_rest

    def fits_ever(self, max_sequence_len: int) -> bool:
        """Returns whether a sequence of `max_sequence_len` slots fits into empty memory, also after
        a preemption just before its last token."""
        n_columns = self.columns_for(max_sequence_len)
        return self.n_blocks_for(n_columns, max_sequence_len) <= self.n_blocks

    @property
    def max_sequence_len(self) -> int:
        """Largest number of slots for which `fits_ever` returns True."""
        fits, too_long = 0, MAX_SEQUENCE_LEN + 1
        if self.fits_ever(MAX_SEQUENCE_LEN):
            return MAX_SEQUENCE_LEN
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if self.fits_ever(middle) else (fits, middle)
        return fits

    def reserve(self, request: Holder) -> Reservation | None:
        """Reserves memory for a request (Algorithm 1, lines 24 to 26), and returns the reservation.
        Returns None if too few blocks or no row is free, or while `is_owing` is true.

        Also counts the tokens that were found in the prefix cache as scheduled.
        """
        if self.is_owing or not self.rows.has_free:
            return None
        n_columns = self.columns_for(self.expected_use.n_tokens(request))
        n_left, cache = self.n_blocks - self.n_reserved_blocks, self.blocks.cache_for(request)
        if self.n_blocks_for(n_columns, 0) - cache.max_found_blocks(request) > n_left:
            return None  # too few even if all its blocks were cached; no search is needed
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
        """Allocates the columns of blocks that a reservation lacks for storing `n_tokens` tokens.
        Returns the ids of the new blocks, one K/V group after the other.

        The queries of the next span begin at position `start`. `n_unscheduled` tokens of the
        prefill, from this position on, are not scheduled yet. Blocks that no query at `start` or
        later sees are given back.
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
        """Returns the ids of a request's blocks: all blocks of the first K/V group, then of the
        second, and so on. The id of a block that has been given back is 0."""
        block_ids = self.groups.by_group(reservation.block_ids)
        for window in reservation.window_blocks:
            block_ids += window.columns
        return block_ids

    def release(self, reservation: Reservation) -> None:
        """Frees the blocks, the row and the reserved memory of a request."""
        self.n_reserved_blocks -= reservation.n_reserved_blocks - len(reservation.block_ids)
        # The last blocks come first, since the prefix cache evicts blocks in this order.
        self.n_reserved_blocks -= self.blocks.give_back(reversed(reservation.block_ids))
        for window in reservation.window_blocks:
            self.blocks.give_back(reversed(window.block_ids))
        self.rows.give_back(reservation.row)
        reservation.clear()

    def retire(self, request: Holder, reservation: Reservation) -> None:
        """Releases the reservation of a request that is in no batch. The prefix cache keeps the
        keys and values of its stored tokens."""
        self.enter(request, reservation)
        self.enter_rest(request, reservation)
        self.release(reservation)

    def discard(self, request: Holder, reservation: Reservation) -> None:
        """Releases the reservation of a broken request that is in no batch. The prefix cache
        forgets all blocks of the request's sequence, because they may not hold finite numbers."""
        self.blocks.forget(request)
        self.release(reservation)

    def forget_from(self, request: Holder, position: int) -> None:
        """Makes the prefix cache forget the blocks of a request's sequence that have slots from
        `position` on, because these slots may not have been written."""
        self.blocks.forget(request, first=position // self.block_size)

    def can_take_over(self, earlier: "KVManager") -> bool:
        """Returns whether the prefix cache of an earlier epoch can be used in this epoch: both
        epochs have a prefix cache, the same number and size of blocks, and the same K/V groups."""
        return self.has_prefix_cache and (
            earlier.has_prefix_cache,
            earlier.n_blocks,
            earlier.block_size,
            earlier.groups,
        ) == (True, self.n_blocks, self.block_size, self.groups)

    def take_over(self, earlier: "KVManager") -> None:
        """Takes over the prefix cache of an earlier epoch. The ranks must still have its keys and
        values. No request may have a reservation in either epoch. `earlier` must not be used any
        more.

        Raises:
            ValueError: blocks are in use, or the memory of the earlier epoch is of another kind.
        """
        if not self.can_take_over(earlier):
            raise ValueError("the K/V memory of the earlier epoch is of another kind")
        self.blocks.take_over(earlier.blocks)

    def n_cached_columns(self, request: Holder) -> int:
        """Returns how many of a request's first columns of blocks are in the prefix cache."""
        return self.blocks.cache_for(request).n_columns(request)

    def has_room(self, reservation: Reservation, n_tokens: int) -> bool:
        """Returns whether a reservation is large enough to store `n_tokens` tokens."""
        return n_tokens <= reservation.n_reserved_columns * self.block_size

    def n_free_slots(self, reservation: Reservation, n_tokens: int) -> int:
        """Returns the number of further tokens for which a reservation has room when `n_tokens`
        tokens are stored."""
        return reservation.n_reserved_columns * self.block_size - n_tokens

    def grow(self, reservation: Reservation, n_tokens: int) -> bool:
        """Enlarges a reservation to `n_tokens` tokens if there is enough memory. Otherwise the
        reservation is unchanged. Returns whether the reservation is large enough now."""
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
        """Cache of the blocks that several requests may share."""
        return self.blocks.cache

    @property
    def has_prefix_cache(self) -> bool:
        """Whether there is a prefix cache, so that requests may share blocks."""
        return isinstance(self.blocks.cache, PrefixCache)

    @property
    def n_slots(self) -> int:
        """Number of tokens that fit into the memory if every K/V group stores all of them. Longer
        sequences fit if some groups have windows."""
        return self._slots_of(self.n_blocks)

    @property
    def n_reserved_slots(self) -> int:
        """Number of slots in the blocks that requests have reserved."""
        return self._slots_of(self.n_reserved_blocks)

    @property
    def n_allocated_blocks(self) -> int:
        """Number of blocks that requests use."""
        return self.blocks.n_in_use

    @property
    def n_allocated_slots(self) -> int:
        """Number of slots in the blocks that requests use."""
        return self._slots_of(self.blocks.n_in_use)

    @property
    def n_shared_slots(self) -> int:
        """Number of slots in the blocks that several requests use."""
        return self._slots_of(self.prefix_cache.n_shared_blocks)

    @property
    def n_unused_slots(self) -> int:
        """Number of slots in the blocks that the prefix cache keeps and no request uses."""
        return self._slots_of(self.prefix_cache.n_unused)

    @property
    def n_free_blocks(self) -> int:
        """Number of blocks that no request has reserved."""
        return self.n_blocks - self.n_reserved_blocks

    def n_blocks_to_admit(self, request: Holder) -> int:
        """Returns how many blocks `reserve` would reserve for a request if the prefix cache had
        none of its tokens."""
        n_columns = self.columns_for(self.expected_use.n_tokens(request))
        return self.n_blocks_for(n_columns, request.n_tokens)

    def n_blocks_for(self, n_columns: int, n_unscheduled: int) -> int:
        """Returns the largest number of blocks of all K/V groups together that a request may have
        with `n_columns` columns of blocks (one block of each group). Its `n_unscheduled` tokens,
        which have yet to be scheduled, determine how many blocks a window needs at once."""
        groups = self.groups
        if not groups.finite:  # nearly always: spares two calls
            return groups.n_whole * n_columns
        n_at_once = groups.n_at_once(n_unscheduled)
        return groups.n_blocks(n_columns, n_at_once, block_size=self.block_size)

    def columns_for(self, n_tokens: int) -> int:
        """Returns the number of columns of blocks that `n_tokens` tokens need."""
        return -(-n_tokens // self.block_size)

    def _move_windows(self, reservation: Reservation, start: int, n_unscheduled: int) -> None:
        """Gives back the blocks that no query at `start` or later sees. Also reduces the
        reservation to the blocks that later spans can touch."""
        for window in reservation.window_blocks:
            self.blocks.give_back(window.pass_by(start, block_size=self.block_size))
        reservation.n_at_once = min(reservation.n_at_once, self.groups.n_at_once(n_unscheduled))
        n_blocks = self.groups.n_blocks(
            reservation.n_reserved_columns, reservation.n_at_once, block_size=self.block_size
        )
        self.n_reserved_blocks -= reservation.n_reserved_blocks - n_blocks
        reservation.n_reserved_blocks = n_blocks

    def _slots_of(self, n_blocks: int) -> int:
        """Returns the number of tokens that `n_blocks` blocks can hold, if the blocks are divided
        equally among the K/V groups."""
        return n_blocks * self.block_size // len(self.groups.windows)
