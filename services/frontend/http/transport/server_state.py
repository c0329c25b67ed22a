"""The state that all connections of one HTTP server share. It includes the open connections and the
running requests."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import ASGIApp

from services.frontend.http.transport.connection_limits import ConnectionLimits, ConnectionPlaces
from services.frontend.http.transport.gathering_transport import WriteRound
from services.frontend.http.transport.loop_shares import LoopShares
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusals


class OpenConnection(Protocol):
    """A connection that a server has accepted."""

    def finish(self) -> None:
        """Closes the connection at once if it is idle, or else after the current answer."""


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The objects that all connections of one server share: the app, the limits, the shares of the
    event loop, the open connections and the running requests."""

    app: ASGIApp
    limits: ConnectionLimits
    places: ConnectionPlaces
    budget: MemoryBudget
    """Memory budget for output that clients have not read."""
    refusals: Refusals
    writes: WriteRound
    shares: LoopShares
    connections: set[OpenConnection] = field(default_factory=set)
    """Connections that are open, and lost connections whose request has not ended yet."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that run the app, one for each request that is being answered."""
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end_connection(self, connection: OpenConnection) -> None:
        """Removes a connection from `connections`. The connection must be lost, and its request
        must have ended."""
        self.connections.discard(connection)
        self._ended.set()

    def end_task(self, task: asyncio.Task[None]) -> None:
        """Removes the task of a request. Called when the task has ended."""
        self.tasks.discard(task)
        self._ended.set()

    async def wait_idle(self) -> None:
        """Waits until there are no connections and no running requests."""
        while self.connections or self.tasks:
            self._ended.clear()
            await self._ended.wait()
