"""The changes of a prefix cache between two plans.

Plans carry these changes to the ranks. A later leader that knows nothing of this one learns from
the ranks which blocks hold which tokens (`services/scheduler/inherited_kv.py`).
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Changes(NamedTuple):
    """Blocks that have entered a prefix cache, and blocks that have left it."""

    secret: bytes = b""
    """Secret with which the keys are made."""
    entered: Mapping[int, bytes] = {}
    """Keys of the full blocks that have entered the cache, by block id."""
    left: Collection[int] = ()
    """Ids of the blocks that have left the cache and may be filled anew."""


NO_CHANGES = Changes()


class EntryChanges:
    """Records the changes of a prefix cache."""

    def __init__(self, secret: bytes, entries: Mapping[int, bytes]) -> None:
        """`entries` are the keys of the blocks that are in the cache already, by block id. The
        first `take` returns them as entered."""
        self._secret = secret
        self._entered = dict(entries)
        self._left: set[int] = set()

    def enter(self, block_id: int, key: bytes) -> None:
        """Records that a full block has entered the cache."""
        self._entered[block_id] = key
        self._left.discard(block_id)

    def leave(self, block_id: int) -> None:
        """Records that a block has left the cache."""
        self._entered.pop(block_id, None)
        self._left.add(block_id)

    def take(self) -> Changes:
        """Returns the changes since the last call."""
        if not self._entered and not self._left:
            return NO_CHANGES
        changes = Changes(self._secret, self._entered, self._left)
        self._entered, self._left = {}, set()
        return changes


class NoEntryChanges:
    """Replacement for `EntryChanges` where the changes are not needed."""

    def enter(self, block_id: int, key: bytes) -> None:
        """Does nothing: the changes are not recorded."""

    def leave(self, block_id: int) -> None:
        """Does nothing: the changes are not recorded."""

    def take(self) -> Changes:
        """Returns no changes."""
        return NO_CHANGES
