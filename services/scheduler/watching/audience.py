"""The audience: the present watchers.

Without watchers no event is made: the classes that make events check `is_there` first.
"""

import time
from collections.abc import Callable, Iterable

from orcinus.v1 import watch_pb2

from services.scheduler.watching.watcher import Watcher


class Audience:
    """Sends events to all watchers of one scheduler process."""

    def __init__(self, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """`wall_ns` returns the nanoseconds since 1970."""
        self.is_there = False
        """Whether there is a watcher."""
        self.wants_decisions = False
        """Whether a watcher has asked for decisions: events about the calls of scheduling cores."""
        self.wall_ns = wall_ns
        self._watchers: set[Watcher] = set()

    def join(self, watcher: Watcher) -> None:
        """Adds a watcher, which gets all events from now on."""
        self._watchers.add(watcher)
        self._count()

    def leave(self, watcher: Watcher) -> None:
        """Removes a watcher."""
        self._watchers.discard(watcher)
        self._count()

    def end(self, reason: str) -> None:
        """Ends the watch of every watcher, and tells each of them the reason."""
        for watcher in self._watchers:
            watcher.end(reason)
        self._watchers.clear()
        self._count()

    def tell(self, event: watch_pb2.WatchEvent, to: Iterable[Watcher] | None = None) -> None:
        """Sends an event, with the present time, to all watchers, or only to the watchers in `to`.
        A decision is sent only to watchers that have asked for decisions."""
        event.time_unix_ns = self.wall_ns()
        n_bytes = event.ByteSize()
        watchers = self._watchers if to is None else to
        is_decision = event.HasField("decision")
        for watcher in watchers:
            if watcher.has_decisions or not is_decision:
                watcher.put(event, n_bytes)
        if any(watcher.is_gone for watcher in watchers):
            self._watchers = {watcher for watcher in self._watchers if not watcher.is_gone}
            self._count()

    def _count(self) -> None:
        self.is_there = bool(self._watchers)
        self.wants_decisions = any(watcher.has_decisions for watcher in self._watchers)
