"""The limits of HTTP connections, and the places for them."""

import resource
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.request.refusals import Refusal, Refusals

RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that HTTP connections leave to the rest of the process: gRPC, the
scheduler, probes, files."""

MAX_STANDING = 64
"""Largest number of connections that are told, at one time, that there is no place for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of each connection and of all together; `FrontendSettings` explains them."""

    max_connections: int = 2048
    max_head_bytes: int = 32 * 2**10
    max_headers: int = 100
    head_limit_s: float = 10.0
    body_limit_s: float = 60.0
    idle_limit_s: float = 75.0
    send_limit_s: float = 30.0


class ConnectionPlace:
    """The place of one connection, from its arrival until it is lost."""

    def __init__(self, places: "ConnectionPlaces", abort: Callable[[], None]) -> None:
        self._places = places
        self.abort = abort

    def set_waiting(self) -> None:
        """Notes that the connection has no unanswered request from now on."""
        self._places.waiting[self] = None

    def set_busy(self) -> None:
        """Notes that the connection has an unanswered request, so that its place cannot be taken
        away."""
        self._places.waiting.pop(self, None)

    def leave(self) -> None:
        """Gives the place back. A second call has no effect."""
        self._places.waiting.pop(self, None)
        self._places.taken.discard(self)
        self._places.standing.discard(self)


class ConnectionPlaces:
    """The places of connections, a fixed number. When all are taken, a new connection gets the
    place of the connection that has waited longest for a request, if any waits: so silent
    connections keep no others out."""

    def __init__(self, max_connections: int, *, refusals: Refusals) -> None:
        self._max_connections = max_connections
        self._refusals = refusals
        self.taken: set[ConnectionPlace] = set()
        self.waiting: dict[ConnectionPlace, None] = {}
        """Places of connections without a request, the one that has waited longest first."""
        self.standing: set[ConnectionPlace] = set()
        """Places of connections that are being told that there is no place for them."""

    def enter(self, abort: Callable[[], None]) -> ConnectionPlace | None:
        """Returns a place for a connection that waits for a request; None if there is none. `abort`
        closes the connection at once."""
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
        """Returns a place for a connection that is being told that there is no place for it; None
        if too many are being told."""
        if len(self.standing) >= MAX_STANDING:
            return None
        place = ConnectionPlace(self, abort)
        self.standing.add(place)
        return place


def check_descriptors(max_connections: int) -> None:
    """Raises ValueError if this process may not open `max_connections` connections of each of its
    two APIs. To be called after `raise_descriptor_limit`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_connections + RESERVED_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"max_connections = {max_connections} needs {needed} file descriptors; "
            f"this process may open {limit}"
        )
