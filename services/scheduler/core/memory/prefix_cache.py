"""The prefix cache: which blocks of K/V memory hold the beginning of which sequences.

Keys and values of a token depend on it and on all tokens before it. So a full block is known by a
key that is a hash of its tokens and of the key of the block before it, and two requests with the
same key can share the block. Only full blocks are shared, and no request writes into a full block:
nothing is ever copied. The last block of a request that ends, its *rest*, is mostly not full. It
goes to the first request that comes with all of its tokens and more, as the next turn of a chat
does; that request owns the block and goes on to fill it.

The chain of keys begins with the request's scope: its account and the salt that its client has
chosen. A request of another scope finds nothing, so that no client can learn another's prompts from
the time that its own take. The hash is keyed with a secret of this process, so that no client can
make two sequences with one key.

A block that is entered has users or none. Without users it keeps its content until its memory is
needed; then the block whose last user left longest ago goes first. Of one request's blocks the last
ones go first, since a block is of use only with all before it.

A model may keep blocks in several groups (`kv_groups.py`), and a key tells the groups apart. A
beginning of a sequence can be shared if it is there in every group: all of it in a group that sees
everything, and in a group with a window as much of its end as the next token sees.

The K/V manager decides when a block is taken, left and evicted.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b

from services.scheduler.core.memory.found import Found, Rest
from services.scheduler.core.memory.holder import BlockKeys, Holder
from services.scheduler.core.memory.kv_groups import ONE_GROUP, BlockGroups, first_seen
from services.scheduler.core.memory.reservation import Reservation

_SECRET = secrets.token_bytes(32)
_OF_FIRST_BLOCK = blake2b(digest_size=16, key=_SECRET, person=b"first")
_OF_OTHERS = blake2b(digest_size=16, key=_SECRET)

_OF_REST = b"rest"
"""What the key of a rest ends with, after that of the block before it."""

MAX_BLOCKS = 2**18
"""Blocks in the cache at most: 80 MB of this process's memory."""


class PrefixCache:
    """The contents of blocks that requests share, and of blocks that no request uses any more."""

    def __init__(
        self, *, block_size: int, groups: BlockGroups = ONE_GROUP, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._block_size = block_size
        self._groups = groups
        # What the keys of each group end with: the first has none.
        marks = [b"", *(bytes((place,)) for place in range(1, len(groups.windows)))]
        self._whole_marks, self._window_marks = marks[: groups.n_whole], marks[groups.n_whole :]
        self._max_blocks = max_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._n_users: dict[int, int] = {}  # of each block that is entered and in use
        self._unused: dict[int, None] = {}  # the next one to evict first
        self._rests: dict[int, Rest] = {}  # by their blocks, which no request uses
        self.n_shared_blocks = 0
        """Blocks with several users."""
        self.n_queried_tokens = 0
        """Tokens of admitted requests that were looked for."""
        self.n_cached_tokens = 0
        """Tokens of these that were found, and so are not computed."""

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    @property
    def n_unused(self) -> int:
        """The number of blocks that are here and that no request uses."""
        return len(self._unused)

    def find(self, request: Holder) -> Found:
        """Returns the blocks of the longest beginning of the request's tokens that is here, but for
        its last token, which is always computed."""
        n_columns = (request.n_tokens - 1) // self._block_size
        blocks: list[int] = []
        if self._whole_marks:
            for index in range(n_columns):
                key = self._keys(request, index + 1)[index]
                n_before = len(blocks)
                for mark in self._whole_marks:
                    if key + mark in self._block_of:
                        blocks.append(self._block_of[key + mark])
                if len(blocks) < n_before + len(self._whole_marks):
                    n_columns = index
                    del blocks[n_before:]
                    break
        if not self._window_marks:
            return Found(n_columns, blocks, rest=self._find_rest(request, n_columns))
        keys = self._keys(request, n_columns)
        n_columns = self._n_seen(keys, n_columns)
        return Found(
            n_columns,
            blocks[: n_columns * len(self._whole_marks)],
            [
                [self._block_of[key + mark] for key in keys[first:n_columns]]
                for mark, first in self._first_seen(n_columns)
            ],
        )

    def max_found_blocks(self, request: Holder) -> int:
        """Returns the number of blocks that `find` returns at most, without looking for them."""
        return request.n_tokens // self._block_size * len(self._whole_marks)

    def next_entry_at(self, n_columns: int) -> int:
        """Returns the number of stored tokens with which a request of which `n_columns` columns are
        entered has another one to enter."""
        return (n_columns + 1) * self._block_size

    def _n_seen(self, keys: Sequence[bytes], n_columns: int) -> int:
        """Returns how many of the first `n_columns` columns can be shared by the groups with a
        window: of these, all that the token after them sees must be here."""
        marks, index = self._first_seen(n_columns), n_columns
        while index > min(first for _, first in marks):
            index -= 1
            if any(
                index >= first and keys[index] + mark not in self._block_of for mark, first in marks
            ):
                n_columns = index
                marks = self._first_seen(n_columns)
        return n_columns

    def _first_seen(self, n_columns: int) -> list[tuple[bytes, int]]:
        """Returns the mark of each group with a window, and the first column that is seen there
        from the token after `n_columns` columns."""
        position = n_columns * self._block_size
        return [
            (mark, first_seen(position, window) // self._block_size)
            for mark, window in zip(self._window_marks, self._groups.finite, strict=True)
        ]

    def n_in_use(self, block_ids: Sequence[int]) -> int:
        """Returns how many of these blocks, which are all here, have users."""
        return sum([block_id not in self._unused for block_id in block_ids])

    def n_shared(self, block_ids: Sequence[int]) -> int:
        """Returns how many of these blocks, which need not all be here, have several users."""
        return sum([self._n_users.get(block_id, 0) > 1 for block_id in block_ids])

    def take_found(self, request: Holder, found: Found, reservation: Reservation) -> None:
        """Makes a request that is admitted a user of the blocks that `find` has returned for it,
        which its reservation has already. A rest among them is the request's own from then on, and
        forgotten here. The tokens of these blocks count as scheduled."""
        self.take(found.block_ids)
        for block_ids in found.window_block_ids:
            self.take(block_ids)
        n_cached = reservation.n_block_slots = found.n_columns * self._block_size
        reservation.n_cached_columns = reservation.n_entered_columns = found.n_columns
        reservation.next_entry_at = self.next_entry_at(found.n_columns)
        if found.rest is not None:
            self.take_rest(found.rest.block_id)
            reservation.block_ids.append(found.rest.block_id)
            reservation.n_block_slots += self._block_size
            n_cached += found.rest.n_tokens
        request.n_scheduled = n_cached
        self.n_queried_tokens += request.n_tokens
        self.n_cached_tokens += n_cached

    def take(self, block_ids: Sequence[int]) -> None:
        """Adds a user to each of these blocks."""
        for block_id in block_ids:
            if block_id in self._unused:
                del self._unused[block_id]
                self._n_users[block_id] = 1
            else:
                self._n_users[block_id] += 1
                self.n_shared_blocks += self._n_users[block_id] == 2

    def enter(
        self, request: Holder, block_ids: Sequence[int], *, first: int, group: int = 0
    ) -> list[int]:
        """Enters blocks of a request in one of the groups, from the column `first` on; the request
        uses them and has all their tokens. A block is not entered if another block with the same
        content is here.

        Returns blocks that were evicted, where there are as many as there may be.
        """
        evicted: list[int] = []
        keys = self._keys(request, first + len(block_ids))
        mark = bytes((group,)) if group else b""
        for index, block_id in enumerate(block_ids, first):
            key = keys[index] + mark
            if key in self._block_of:
                continue
            if len(self._key_of) >= self._max_blocks:
                if not self._unused:
                    break
                evicted.append(self.evict())
            self._block_of[key] = block_id
            self._key_of[block_id] = key
            self._n_users[block_id] = 1
        return evicted

    def enter_rest(
        self, request: Holder, block_id: int, *, column: int, n_tokens: int
    ) -> int | None:
        """Enters the rest of a request, which ends and has all tokens before its block, that of
        `column`, and the first `n_tokens` of those in it. Returns the block of the rest in its
        place, if there was one: the newest is the likeliest to be gone on from."""
        key = self._keys(request, column)[column - 1] + _OF_REST
        replaced = self._block_of.get(key)
        if replaced is not None:
            self.take_rest(replaced)
        elif len(self._key_of) >= self._max_blocks:
            return None
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        self._n_users[block_id] = 1
        packed = request.packed_span(column * self._block_size, n_tokens)
        self._rests[block_id] = Rest(block_id, n_tokens, packed)
        return replaced

    def take_rest(self, block_id: int) -> None:
        """Forgets a rest, whose block has another owner from now on."""
        del self._unused[block_id]
        self._forget(block_id)

    def leave(self, block_id: int) -> bool:
        """Removes a user of a block that is here; returns whether it was the last one."""
        self._n_users[block_id] -= 1
        if self._n_users[block_id]:
            self.n_shared_blocks -= self._n_users[block_id] == 1
            return False
        del self._n_users[block_id]
        self._unused[block_id] = None
        return True

    def evict(self) -> int:
        """Forgets the block that has been without users longest, and returns it."""
        block_id = next(iter(self._unused))
        del self._unused[block_id]
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        del self._block_of[self._key_of.pop(block_id)]
        self._rests.pop(block_id, None)

    def _find_rest(self, request: Holder, n_columns: int) -> Rest | None:
        """Returns the rest after so many columns, if the request has its tokens and more."""
        if not n_columns or len(self._whole_marks) > 1:
            return None
        key = self._keys(request, n_columns)[n_columns - 1] + _OF_REST
        block_id = self._block_of.get(key)
        if block_id is None:
            return None
        rest, start = self._rests[block_id], n_columns * self._block_size
        if start + rest.n_tokens >= request.n_tokens:
            return None
        return rest if request.packed_span(start, rest.n_tokens) == rest.packed else None

    def _keys(self, request: Holder, n_blocks: int) -> list[bytes]:
        """Returns the keys of a request's first blocks, of `n_blocks` at least. Its tokens never
        change, so each key is made once."""
        known = request.block_keys
        if known is None or known.block_size != self._block_size:
            known = request.block_keys = BlockKeys(self._block_size)
        keys, block_size = known.keys, self._block_size
        for index in range(len(keys), n_blocks):
            before = keys[-1] if keys else request.cache_scope or b""
            hashed = (_OF_OTHERS if keys else _OF_FIRST_BLOCK).copy()
            hashed.update(before + request.packed_span(index * block_size, block_size))
            keys.append(hashed.digest())
        return keys
