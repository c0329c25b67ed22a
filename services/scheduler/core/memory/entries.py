"""Entries: decides which blocks of a request are entered into the prefix cache, and when.

A block is entered when the batch that writes it has been selected. So this batch is always selected
before any batch that reads the block from the cache. Every stage runs batches in the order of
selection, however many are in flight, so the content of a block is written before the block is
read.
"""

from itertools import islice

from services.scheduler.core.memory.blocks import Blocks
from services.scheduler.core.memory.holder import Holder
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.prefix_cache import PrefixCache
from services.scheduler.core.memory.reservation import Reservation


class Entries:
    """Enters the blocks of requests into the prefix cache of one memory."""

    def __init__(self, blocks: Blocks, *, block_size: int, groups: BlockGroups) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._n_whole = groups.n_whole
        self._has_rests = groups.n_whole == len(groups.windows) == 1

    def enter(self, request: Holder, reservation: Reservation) -> None:
        """Enters into the prefix cache each block of the request that is full of scheduled and
        known tokens, unless the block was entered before."""
        cache, n_stored = self._blocks.cache, min(request.n_scheduled, request.n_tokens)
        if n_stored < reservation.next_entry_at or not isinstance(cache, PrefixCache):
            return
        first, end = reservation.n_entered_columns, n_stored // self._block_size
        n_whole, evicted = self._n_whole, list[int]()
        for group in range(n_whole):
            block_ids = reservation.block_ids[first * n_whole + group : end * n_whole : n_whole]
            evicted += cache.enter(request, block_ids, first=first, group=group)
        for group, blocks in enumerate(reservation.window_blocks, n_whole):
            held, gone = max(first, blocks.first_column), blocks.first_column
            if held < end:
                block_ids = list(islice(blocks.block_ids, held - gone, end - gone))
                evicted += cache.enter(request, block_ids, first=held, group=group)
        self._blocks.free_evicted(evicted)
        reservation.n_entered_columns = end
        reservation.next_entry_at = cache.next_entry_at(end)

    def enter_rest(self, request: Holder, reservation: Reservation) -> None:
        """Enters the last, partly filled block of a request into the prefix cache. The request must
        be in no batch and about to be released. The entry covers the tokens of the block that are
        stored and known. The block is not entered if it is in the cache already: it was entered as
        full for a batch that was then lost."""
        cache = self._blocks.cache_for(request)
        if not (self._has_rests and isinstance(cache, PrefixCache)):
            return
        column, n_tokens = divmod(min(request.n_scheduled, request.n_tokens), self._block_size)
        if not (column and n_tokens) or reservation.block_ids[column] in cache:
            return
        replaced = cache.enter_rest(
            request, reservation.block_ids[column], column=column, n_tokens=n_tokens
        )
        if replaced is not None:
            self._blocks.free(replaced)
