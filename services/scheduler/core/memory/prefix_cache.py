"""The prefix cache: records which blocks of K/V memory hold the beginnings of which sequences.

Keys and values of a token depend on the token and on all tokens before it. So the cache identifies
a full block by a key: a hash of the tokens in the block and of the key of the block before. Two
requests with the same key can share the block. Only full blocks are shared, and no request writes
into a full block, so blocks are never copied. The last block of a request that ends, called its
*rest*, is usually not full. A rest goes to the first request whose sequence contains all tokens of
the rest and more, such as the next turn of a chat. That request owns the block from then on and
continues to fill it.

The chain of keys begins with the request's scope, which consists of its account and the salt that
its client has chosen. A request with another scope finds nothing. So no client can learn another
client's prompts by measuring how long its own prompts take. The hash is keyed with a secret, so
that no client can construct two sequences with the same key. The secret belongs to this process, or
to an earlier leader whose entries are restored.

A block in the cache may be used by requests or not. An unused block keeps its content until its
memory is needed. Then the block whose last user left longest ago is evicted first. Among the blocks
of one request the last ones are evicted first, because a block is useful only together with all
blocks before it.

A model may keep blocks in several groups (`kv_groups.py`), and a key includes a mark of its group.
The beginning of a sequence can be shared if every group has the needed blocks. A group that sees
all tokens needs all blocks of the beginning. A group with a window needs only the last blocks,
which the next token sees.

The K/V manager decides when a block is taken, left by a user, or evicted.
"""

import itertools
import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from services.scheduler.core.memory.entry_changes import Changes, EntryChanges, NoEntryChanges
from services.scheduler.core.memory.found import Found, Rest
from services.scheduler.core.memory.holder import BlockKeys, Holder
from services.scheduler.core.memory.kv_groups import ONE_GROUP, BlockGroups, first_seen
from services.scheduler.core.memory.reservation import Reservation

SECRET_BYTES = 32
"""Length of a secret for the keys of blocks."""

OWN_SECRET = secrets.token_bytes(SECRET_BYTES)
"""Secret of this process for the keys of blocks."""

_OF_REST = b"rest"
"""Last part of the cache key of a rest, which is the partly filled last block of an ended request.
The first part is the key of the block before it."""

MAX_BLOCKS = 2**18
"""Largest number of blocks in the caches of all pipelines (`cache_room.py`). Their entries take 60
MB of this process's memory."""


class PrefixCache:
    """Records the cached blocks: blocks that running requests use and may share, and blocks that no
    request uses any more."""

    def __init__(
        self, *, block_size: int, groups: BlockGroups = ONE_GROUP, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._block_size = block_size
        self._groups = groups
        # Suffix of the keys of each group; the first group has an empty suffix.
        marks = [b"", *(bytes((place,)) for place in range(1, len(groups.windows)))]
        self._whole_marks, self._window_marks = marks[: groups.n_whole], marks[groups.n_whole :]
        self._all_marks = (*marks, _OF_REST)
        self._max_blocks = max_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._n_users: dict[int, int] = {}  # for each entered block that is in use
        self._unused: dict[int, None] = {}  # in the order of eviction
        self._rests: dict[int, Rest] = {}  # by block id; no request uses these blocks
        self._forgotten: set[int] = set()  # blocks that have users, and get no more
        self._changes: EntryChanges | NoEntryChanges = NoEntryChanges()
        self.use_secret(OWN_SECRET)
        self.n_shared_blocks = 0
        """Number of blocks with several users."""
        self.n_queried_tokens = 0
        """Number of tokens of the admitted requests for which the cache was searched."""
        self.n_cached_tokens = 0
        """Number of tokens of admitted requests that were found in the cache and so are not
        computed."""

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    def use_secret(self, secret: bytes) -> None:
        """Sets the secret with which the keys of blocks are made. It must have `SECRET_BYTES`
        bytes, and the cache must be empty."""
        self._secret = secret
        self._of_first_block = blake2b(digest_size=16, key=secret, person=b"first")
        self._of_others = blake2b(digest_size=16, key=secret)

    def restore(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Enters the blocks of an earlier leader's cache. They have no users. `entries` are the ids
        and keys of the blocks, in an order in which each block comes after the earlier blocks of
        its sequence. The cache must be empty and have the secret of that leader."""
        block_of = {key: block_id for block_id, key in list(entries)[: self._max_blocks]}
        self._block_of = block_of
        self._key_of = {block_id: key for key, block_id in block_of.items()}
        self._unused = dict.fromkeys(reversed(block_of.values()))

    def record_changes(self) -> None:
        """Begins to record the changes of the cache, for `take_changes`. The blocks that are in the
        cache already are recorded as entered, except forgotten blocks and rests (partly filled last
        blocks of ended requests)."""
        entries = {it: key for it, key in self._key_of.items() if it not in self._rests}
        for block_id in self._forgotten:
            entries.pop(block_id, None)
        self._changes = EntryChanges(self._secret, entries)

    def take_changes(self) -> Changes:
        """Returns the changes of the entries since the last call. There are none before
        `record_changes` is called."""
        return self._changes.take()

    @property
    def n_unused(self) -> int:
        """Number of blocks in the cache that no request uses."""
        return len(self._unused)

    def find(self, request: Holder) -> Found:
        """Returns the blocks of the longest beginning of the request's sequence that is in the
        cache. The last token of the request is never included, because that token must always be
        computed."""
        n_columns = self._n_whole_columns(request)
        keys = self._keys(request, n_columns)
        blocks = [
            self._block_of[key + mark] for key in keys[:n_columns] for mark in self._whole_marks
        ]
        if not self._window_marks:
            return Found(n_columns, blocks, rest=self._find_rest(request, n_columns))
        n_columns = self._n_seen(keys, n_columns)
        return Found(
            n_columns,
            blocks[: n_columns * len(self._whole_marks)],
            [
                [self._block_of[key + mark] for key in keys[first:n_columns]]
                for mark, first in self._first_seen(n_columns)
            ],
        )

    def n_columns(self, request: Holder) -> int:
        """Returns only the number of columns of blocks that `find` would find for a request."""
        n_columns = self._n_whole_columns(request)
        if not self._window_marks:
            return n_columns
        return self._n_seen(self._keys(request, n_columns), n_columns)

    def max_found_blocks(self, request: Holder) -> int:
        """Returns an upper limit for the number of blocks that `find` finds in the groups that see
        all tokens. Does not search the cache."""
        return request.n_tokens // self._block_size * len(self._whole_marks)

    def next_entry_at(self, n_columns: int) -> int:
        """Returns the length in tokens, from the beginning of the sequence, at which a request has
        one more full column of blocks than `n_columns`. This column can then enter the cache."""
        return (n_columns + 1) * self._block_size

    def _n_whole_columns(self, request: Holder) -> int:
        """Returns how many of a request's first columns of blocks are in the cache, in all groups
        that see all tokens. Only columns that are full without the last token of the request count.
        If no group sees all tokens, all these columns count."""
        n_columns = (request.n_tokens - 1) // self._block_size
        if not self._whole_marks:
            return n_columns
        for index in range(n_columns):
            key = self._keys(request, index + 1)[index]
            for mark in self._whole_marks:
                if key + mark not in self._block_of:
                    return index
        return n_columns

    def _n_seen(self, keys: Sequence[bytes], n_columns: int) -> int:
        """Returns how many of the first `n_columns` columns of blocks a request can share. After
        the shared columns, the next token must find every block that its attention windows see."""
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
        """Returns two values for each group with a window: the suffix of the keys of the group's
        blocks, and the index of the first column of blocks that the next token sees. The next token
        is the one after the first `n_columns` columns."""
        position = n_columns * self._block_size
        return [
            (mark, first_seen(position, window) // self._block_size)
            for mark, window in zip(self._window_marks, self._groups.finite, strict=True)
        ]

    def n_in_use(self, block_ids: Sequence[int]) -> int:
        """Returns how many of the given blocks have users. All must be in the cache."""
        return sum([block_id not in self._unused for block_id in block_ids])

    def n_shared(self, block_ids: Sequence[int]) -> int:
        """Returns how many of the given blocks have several users. Blocks outside the cache count
        as having none."""
        return sum([self._n_users.get(block_id, 0) > 1 for block_id in block_ids])

    def take_found(self, request: Holder, found: Found, reservation: Reservation) -> None:
        """Makes an admitted request a user of the blocks that `find` returned. The reservation of
        the request lists the full blocks already. A rest among the found blocks is added to the
        reservation. It belongs to the request alone from then on, and the cache forgets the rest.
        The tokens of all these blocks count as scheduled."""
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
        """Adds a user to each of the given blocks. All must be in the cache."""
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
        """Enters blocks of a request into the cache: its blocks in the K/V group `group`, from the
        column `first` on. The request must use them, and all their tokens must be known. A block is
        not entered if the cache has another block with the same content.

        Returns the blocks that were evicted because the cache had reached its largest number of
        blocks.
        """
        evicted: list[int] = []
        keys = self._keys(request, first + len(block_ids))
        mark = bytes((group,)) if group else b""
        for index, block_id in enumerate(block_ids, first):
            key = keys[index] + mark
            if key in self._block_of:
                continue
            if len(self._key_of) >= self._max_blocks:
                evicted += self._evict_to(self._max_blocks - 1)
                if len(self._key_of) >= self._max_blocks:
                    break
            self._block_of[key] = block_id
            self._key_of[block_id] = key
            self._n_users[block_id] = 1
            self._changes.enter(block_id, key)
        return evicted

    def enter_rest(
        self, request: Holder, block_id: int, *, column: int, n_tokens: int
    ) -> int | None:
        """Enters into the cache the rest of a request that ends: its last, partly filled block,
        which is in column `column` and has `n_tokens` tokens. All earlier tokens of the request
        must be stored too.

        If the cache has a rest that follows the same full blocks, that rest is replaced, because
        the newest rest is the most likely to be continued. Returns the replaced block, or None if
        no rest was replaced.
        """
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
        """Removes a rest from the cache, because a request has taken its block and will fill it."""
        del self._unused[block_id]
        self._forget(block_id)

    def leave(self, block_id: int) -> bool:
        """Removes one user from a block in the cache. Returns whether that was the last user."""
        self._n_users[block_id] -= 1
        if self._n_users[block_id]:
            self.n_shared_blocks -= self._n_users[block_id] == 1
            return False
        del self._n_users[block_id]
        if block_id in self._forgotten:
            self._forgotten.remove(block_id)
            del self._key_of[block_id]
        else:
            self._unused[block_id] = None
        return True

    def forget(self, request: Holder, *, first: int = 0) -> list[int]:
        """Forgets all blocks of a request's sequence from the column `first` on, so that no further
        request finds them.

        Returns the blocks that had no users. They are free now. A block with users stays in the
        cache until its last user leaves, and is free then.
        """
        keys = self._known_keys(request).keys[first:]
        free: list[int] = []
        for key, mark in itertools.product(keys, self._all_marks):
            block_id = self._block_of.get(key + mark)
            if block_id is None:
                continue
            if block_id in self._unused:
                del self._unused[block_id]
                self._forget(block_id)
                free.append(block_id)
            else:
                del self._block_of[key + mark]
                self._forgotten.add(block_id)
                self._changes.leave(block_id)
        return free

    def evict(self) -> int:
        """Removes a block from the cache and returns its id. The block is the one that has been
        without users for the longest time."""
        block_id = next(iter(self._unused))
        del self._unused[block_id]
        self._forget(block_id)
        return block_id

    def begin_count(self) -> None:
        """Sets `n_queried_tokens` and `n_cached_tokens` to 0, for a new epoch."""
        self.n_queried_tokens = self.n_cached_tokens = 0

    def limit(self, max_blocks: int) -> list[int]:
        """Sets the largest number of blocks in the cache. Returns the blocks that are evicted
        because there are more. Blocks with users are not evicted."""
        self._max_blocks = max_blocks
        return self._evict_to(max_blocks)

    def _evict_to(self, n_blocks: int) -> list[int]:
        """Evicts blocks without users until the cache has at most `n_blocks` blocks, and returns
        the evicted blocks."""
        n_evicted = min(len(self._key_of) - n_blocks, len(self._unused))
        return [self.evict() for _ in range(n_evicted)]

    def _forget(self, block_id: int) -> None:
        del self._block_of[self._key_of.pop(block_id)]
        self._rests.pop(block_id, None)
        self._changes.leave(block_id)

    def _find_rest(self, request: Holder, n_columns: int) -> Rest | None:
        """Returns the rest after `n_columns` columns, if the request has all tokens of the rest and
        more. Returns None otherwise."""
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
        """Returns the keys of at least the first `n_blocks` blocks of a request. The tokens of a
        request never change, so each key is computed once."""
        keys, block_size = self._known_keys(request).keys, self._block_size
        for index in range(len(keys), n_blocks):
            before = keys[-1] if keys else request.cache_scope or b""
            hashed = (self._of_others if keys else self._of_first_block).copy()
            hashed.update(before + request.packed_span(index * block_size, block_size))
            keys.append(hashed.digest())
        return keys

    def _known_keys(self, request: Holder) -> BlockKeys:
        """Returns the record of the keys of a request's blocks that were computed so far. The
        record begins anew, without keys, if it was made for another block size or another secret
        than this cache has."""
        known = request.block_keys
        if known is None or (known.block_size, known.secret) != (self._block_size, self._secret):
            known = request.block_keys = BlockKeys(self._block_size, self._secret)
        return known
