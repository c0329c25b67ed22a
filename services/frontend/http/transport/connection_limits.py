"""The limits of HTTP connections, and the places that there are for them."""

import resource
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.request.refusals import Refusal, Refusals

RESERVED_DESCRIPTORS = 256
"""File descriptors that HTTP connections leave to the rest of the process: gRPC, the scheduler,
probes, files."""

MAX_STANDING = 64
"""Connections at most that are told carefully that there is no place for them."""


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
        """Notes that the connection has no request in the making from now on."""
        self._places.waiting[self] = None

    def set_busy(self) -> None:
        """Notes that the connection has a request: nobody takes its place."""
        self._places.waiting.pop(self, None)

    def leave(self) -> None:
        """Gives the place back; twice does no harm."""
        self._places.waiting.pop(self, None)
        self._places.taken.discard(self)
        self._places.standing.discard(self)


class ConnectionPlaces:
    """The places of connections, a fixed number. When all are taken, a new connection gets that of
    the one that has waited longest for a request, if one waits: silent ones keep nobody out."""

    def __init__(self, max_connections: int, *, refusals: Refusals) -> None:
        self._max_connections = max_connections
        self._refusals = refusals
        self.taken: set[ConnectionPlace] = set()
        self.waiting: dict[ConnectionPlace, None] = {}
        """The places of connections without a request; longest first."""
        self.standing: set[ConnectionPlace] = set()
        """Those for whom there was no place, while they are told."""

    def enter(self, abort: Callable[[], None]) -> ConnectionPlace | None:
        """Returns a place, whose connection waits; None if all are taken. `abort` closes the
        connection at once."""
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
        """Returns a place for a connection that has none, until it has been told; None if too many
        are being told."""
        if len(self.standing) >= MAX_STANDING:
            return None
        place = ConnectionPlace(self, abort)
        self.standing.add(place)
        return place


def check_descriptors(max_connections: int) -> None:
    """Raises ValueError if this process may not open so many connections of each of its two APIs;
    `raise_descriptor_limit` comes before."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_connections + RESERVED_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"max_connections = {max_connections} needs {needed} file descriptors; "
            f"this process may open {limit}"
        )
