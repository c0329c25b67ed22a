"""The adapters that were loaded while the system runs, as each scheduler and frontend knows them.

A list has one entry for each name. An entry says that an adapter was loaded under the name, or that
the adapter of this name was unloaded. Each change of a name has a higher version, and a list keeps
the entry with the highest version. So two lists that have received the same changes are equal, in
whatever order the changes came. A new leader receives the lists of several frontends and then has
the newest entry of each name.

Versions grow with the clock. So a new leader gives out higher versions than the previous leader,
even if it has not yet seen all changes of the previous leader.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import merge

MAX_LOADED = 1024
"""Largest number of adapters in a list."""

MAX_UNLOADED = 1024
"""Largest number of names that a list remembers as unloaded. Names that were unloaded earliest are
forgotten first."""


@dataclass(frozen=True, slots=True, order=True)
class AdapterEntry:
    """Says that an adapter was loaded under a name, or that the adapter of this name was unloaded.
    Entries of one name are ordered by their versions."""

    version: int
    is_removed: bool
    """Whether the adapter of this name was unloaded."""
    name: str
    source: str
    digest: str


class AdapterList:
    """Holds the newest entry for each name of an adapter. However long the list is, a change takes
    about the same time. This matters because schedulers and frontends change the list in their
    event loops."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        """`now` returns the time in seconds since 1970."""
        self._now = now
        self._newest = 0
        self._entries: dict[str, AdapterEntry] = {}
        self._loaded: list[AdapterEntry] = []  # ascending by version
        self._removed: list[AdapterEntry] = []  # ascending by version
        self._by_digest: dict[str, dict[str, AdapterEntry]] = {}  # loaded, then by name

    @property
    def entries(self) -> tuple[AdapterEntry, ...]:
        """All entries, in ascending order of their versions."""
        return tuple(merge(self._loaded, self._removed))

    @property
    def is_full(self) -> bool:
        """Whether the list has as many loaded adapters as it may have."""
        return len(self._loaded) >= MAX_LOADED

    @property
    def digests(self) -> Mapping[str, str]:
        """Digest of each loaded adapter, by the adapter's name, in alphabetical order of names."""
        return dict(sorted((one.name, one.digest) for one in self._loaded))

    def get(self, name: str) -> AdapterEntry | None:
        """Returns the entry of the adapter `name`. Returns None if no such adapter is loaded."""
        found = self._entries.get(name)
        return None if found is None or found.is_removed else found

    def source_of(self, digest: str) -> AdapterEntry | None:
        """Returns the entry of a loaded adapter whose files have the digest `digest`. Returns None
        if there is no such adapter."""
        return next(iter(self._by_digest.get(digest, {}).values()), None)

    def put(self, name: str, source: str, digest: str) -> AdapterEntry:
        """Notes that the adapter `name` was loaded, and returns the new entry."""
        entry = AdapterEntry(self._next_version(), False, name, source, digest)
        self.merge([entry])
        return entry

    def remove(self, name: str) -> AdapterEntry | None:
        """Notes that the adapter `name` was unloaded, and returns the new entry. Returns None if no
        adapter of this name is loaded."""
        if self.get(name) is None:
            return None
        entry = AdapterEntry(self._next_version(), True, name, "", "")
        self.merge([entry])
        return entry

    def merge(self, entries: Iterable[AdapterEntry]) -> list[AdapterEntry]:
        """Puts each of `entries` that is newer than the list's entry of the same name into the
        list. Then drops the oldest entries beyond the limits of the list. Returns the new entries
        that were not dropped."""
        newer: dict[str, AdapterEntry] = {}
        for one in entries:
            known = self._entries.get(one.name)
            if known is None or one > known:
                self._discard(one.name)
                self._add(one)
                newer[one.name] = one
        self._forget(self._loaded, MAX_LOADED)
        self._forget(self._removed, MAX_UNLOADED)
        return [one for name, one in newer.items() if name in self._entries]

    def _next_version(self) -> int:
        return max(self._newest + 1, int(self._now() * 1000))

    def _add(self, entry: AdapterEntry) -> None:
        self._newest = max(self._newest, entry.version)
        self._entries[entry.name] = entry
        insort(self._kind_of(entry), entry)
        if not entry.is_removed:
            self._by_digest.setdefault(entry.digest, {})[entry.name] = entry

    def _discard(self, name: str) -> None:
        """Removes the entry of a name, if there is one."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        kind = self._kind_of(entry)
        del kind[bisect_left(kind, entry)]
        if not entry.is_removed:
            same = self._by_digest[entry.digest]
            del same[name]
            if not same:
                del self._by_digest[entry.digest]

    def _forget(self, kind: list[AdapterEntry], limit: int) -> None:
        """Forgets the oldest entries of `kind`, the loaded or the unloaded ones, if there are more
        than `limit`."""
        for one in kind[: max(0, len(kind) - limit)]:
            self._discard(one.name)

    def _kind_of(self, entry: AdapterEntry) -> list[AdapterEntry]:
        return self._removed if entry.is_removed else self._loaded
