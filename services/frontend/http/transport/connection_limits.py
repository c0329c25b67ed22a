"""The limits of HTTP connections. A limited number of connections may be open at the same time:
each takes one of a fixed number of places."""

import resource
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.request.refusals import Refusal, Refusals

RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that are kept free of HTTP connections, for the rest of the process:
gRPC, the scheduler, probes, files."""

MAX_STANDING = 64
"""Largest number of extra places. A connection that gets no normal place is refused. With an extra
place it stays open while the client reads the refusal; without, it is closed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of each connection and of all connections together. `FrontendSettings` explains
    the fields."""

    max_connections: int = 2048
    max_head_bytes: int = 32 * 2**10
    max_headers: int = 100
    head_limit_s: float = 10.0
    body_limit_s: float = 60.0
    idle_limit_s: float = 75.0
    send_limit_s: float = 30.0


class ConnectionPlace:
    """The place of one connection, one of at most `max_connections`. The connection takes the place
    when it is accepted, and leaves it when it is lost."""

    def __init__(self, places: "ConnectionPlaces", abort: Callable[[], None]) -> None:
        self._places = places
        self.abort = abort

    def set_waiting(self) -> None:
        """Marks the connection as waiting for a request. Another connection may then take the
        place."""
        self._places.waiting[self] = None

    def set_busy(self) -> None:
        """Marks the connection as having an unanswered request. No other connection can take the
        place."""
        self._places.waiting.pop(self, None)

    def leave(self) -> None:
        """Frees the place. A second call has no effect."""
        self._places.waiting.pop(self, None)
        self._places.taken.discard(self)
        self._places.standing.discard(self)


class ConnectionPlaces:
    """A fixed number of places for connections. If all places are taken, a new connection takes the
    place of the connection that has waited longest for a request, so silent connections do not keep
    others out. If no connection waits for a request, the new connection is refused."""

    def __init__(self, max_connections: int, *, refusals: Refusals) -> None:
        self._max_connections = max_connections
        self._refusals = refusals
        self.taken: set[ConnectionPlace] = set()
        self.waiting: dict[ConnectionPlace, None] = {}
        """Places of connections that wait for a request, ordered from the longest wait to the
        shortest."""
        self.standing: set[ConnectionPlace] = set()
        """Extra places of connections that are being refused, because all normal places are
        taken."""

    def enter(self, abort: Callable[[], None]) -> ConnectionPlace | None:
        """Returns a place for a new connection, marked as waiting for a request. If all places are
        taken, closes the connection that has waited longest for a request and reuses its place. If
        no connection waits, returns None. `abort` must close the new connection at once; it is
        called if another connection takes the place later."""
        if len(self.taken) >= self._max_connections:
            self._refusals[Refusal.CONNECTIONS] += 1
            longest = next(iter(self.waiting), None)
            if longest is None:
                return None
            longest.leave()
            longest.abort()
        place = ConnectionPlace(self, abort)
        self.taken.add(place)
        place.set_waiting()
        return place

    def stand(self, abort: Callable[[], None]) -> ConnectionPlace | None:
        """Returns an extra place for a connection that is being refused. Returns None if
        `MAX_STANDING` connections have an extra place already."""
        if len(self.standing) >= MAX_STANDING:
            return None
        place = ConnectionPlace(self, abort)
        self.standing.add(place)
        return place


def check_descriptors(max_connections: int) -> None:
    """Raises ValueError if this process may not open `max_connections` connections for HTTP and
    another `max_connections` for gRPC. Must be called after `raise_descriptor_limit`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_connections + RESERVED_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"max_connections = {max_connections} needs {needed} file descriptors; "
            f"this process may open {limit}"
        )
