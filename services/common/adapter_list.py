"""The adapters that were loaded while the system runs, as each scheduler and frontend knows them.

A list has one entry for each name: an adapter, or the mark that the name was unloaded. Each change
of a name has a higher version, and a list keeps the entry with the highest version. So lists that
have got the same changes are equal, in whatever order the changes came, and a new leader that gets
the lists of several frontends ends with the newest entry of each name.

Versions grow with the clock: a leader that has not yet seen all changes of the leader before gives
out higher versions nevertheless.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MAX_LOADED = 1024
"""Largest number of adapters in a list."""

MAX_UNLOADED = 1024
"""Largest number of names that a list remembers as unloaded: those that were unloaded last."""


@dataclass(frozen=True, slots=True, order=True)
class AdapterEntry:
    """What is known of a name. Entries of one name are ordered by their versions."""

    version: int
    is_removed: bool
    """Whether the adapter of this name was unloaded."""
    name: str
    source: str
    digest: str


class AdapterList:
    """The newest entry of each name."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        """`now` returns the time in seconds since 1970."""
        self._now = now
        self._newest = 0
        self._entries: dict[str, AdapterEntry] = {}

    @property
    def entries(self) -> tuple[AdapterEntry, ...]:
        """All entries, those with the lowest versions first."""
        return tuple(sorted(self._entries.values()))

    @property
    def is_full(self) -> bool:
        """Whether no other name can be added."""
        return len(self.digests) >= MAX_LOADED

    @property
    def digests(self) -> Mapping[str, str]:
        """Digest of each adapter that is loaded, by its name, in alphabetical order."""
        return {
            name: one.digest for name, one in sorted(self._entries.items()) if not one.is_removed
        }

    def get(self, name: str) -> AdapterEntry | None:
        """Returns the entry of an adapter that is loaded. Returns None if there is none."""
        found = self._entries.get(name)
        return None if found is None or found.is_removed else found

    def source_of(self, digest: str) -> AdapterEntry | None:
        """Returns an entry of an adapter with a digest. Returns None if none is loaded."""
        return next(
            (one for one in self._entries.values() if one.digest == digest and not one.is_removed),
            None,
        )

    def put(self, name: str, source: str, digest: str) -> AdapterEntry:
        """Notes that an adapter was loaded, and returns its entry."""
        return self._change(AdapterEntry(self._next_version(), False, name, source, digest))

    def remove(self, name: str) -> AdapterEntry | None:
        """Notes that an adapter was unloaded, and returns the entry that says so. Returns None if
        no adapter of this name is loaded."""
        if self.get(name) is None:
            return None
        return self._change(AdapterEntry(self._next_version(), True, name, "", ""))

    def merge(self, entries: Iterable[AdapterEntry]) -> list[AdapterEntry]:
        """Takes over the entries that are newer than those in the list, and returns them."""
        newer: dict[str, AdapterEntry] = {}
        for one in entries:
            known = self._entries.get(one.name)
            if known is None or one > known:
                newer[one.name] = self._change(one)
        return list(newer.values())

    def _next_version(self) -> int:
        return max(self._newest + 1, int(self._now() * 1000))

    def _change(self, entry: AdapterEntry) -> AdapterEntry:
        self._entries[entry.name] = entry
        self._newest = max(self._newest, entry.version)
        self._forget(MAX_LOADED, is_removed=False)
        self._forget(MAX_UNLOADED, is_removed=True)
        return entry

    def _forget(self, limit: int, *, is_removed: bool) -> None:
        """Forgets the oldest entries of one kind if there are more than `limit`."""
        if len(self._entries) > limit:
            kind = [one for one in self.entries if one.is_removed is is_removed]
            for one in kind[: max(0, len(kind) - limit)]:
                del self._entries[one.name]
