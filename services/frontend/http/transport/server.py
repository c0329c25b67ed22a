"""The HTTP server, which serves an app on bound sockets until `stop` is called.

The server ends in three steps, so that clients with open connections lose no request. After
`leave`, every answer announces that its connection closes. Clients then open new connections, for
which a load balancer may choose another frontend. `close_connections` closes idle connections at
once, and all others after the current answer. `stop` ends the server.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http.transport.acceptor import Acceptor
from services.frontend.http.transport.connection import HttpConnection
from services.frontend.http.transport.connection_limits import ConnectionLimits, ConnectionPlaces
from services.frontend.http.transport.gathering_transport import WriteRound
from services.frontend.http.transport.loop_shares import LoopShares
from services.frontend.http.transport.server_state import ServerState
from services.frontend.request.client_call import ID_HEADER, TIMEOUT_HEADER, begin_call
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusals

BACKLOG = 2048
"""Number of connections that may wait to be accepted. The number suffices for many clients that
connect at the same moment."""

FINISH_S = 2.0
"""Seconds for sending the last answers after `stop` has been called."""


class HttpServer:
    """Serves an app on sockets that have been bound before. With a TLS context, the sockets are
    served only over TLS. The server may also serve on a Unix socket, without TLS. The limits apply
    to the connections of all sockets together."""

    def __init__(
        self,
        app: ASGIApp,
        listeners: Sequence[socket.socket],
        *,
        unix_listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        limits: ConnectionLimits | None = None,
        budget: MemoryBudget | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """Prepares to serve on the running event loop."""
        self._app = app
        for listener in listeners:
            # Accepted connections inherit the option. asyncio sets the option only on sockets whose
            # protocol is given as TCP, which is not so here. Without the option, each event would
            # wait until the client has acknowledged the event before.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listeners = [(listener, tls) for listener in listeners]
        if unix_listener is not None:
            self._listeners.append((unix_listener, None))
        self._is_leaving = False
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        limits = limits or ConnectionLimits()
        refusals = Refusals() if refusals is None else refusals
        self.state = ServerState(
            app=self._run_app,
            limits=limits,
            places=ConnectionPlaces(limits.max_connections, refusals=refusals),
            budget=budget or MemoryBudget(64 * 2**20),
            refusals=refusals,
            writes=WriteRound(loop),
            shares=LoopShares(loop),
        )
        """State that all connections of the server share."""

    async def run_until_stopped(self) -> None:
        """Serves until `stop` is called, then sends the rest of the answers for up to FINISH_S
        seconds."""
        acceptors = [self._accept(*listener) for listener in self._listeners]
        await self._stopping.wait()
        for acceptor in acceptors:
            acceptor.close()
        for listener, _ in self._listeners:
            listener.close()
        self.close_connections()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self.state.wait_idle()
        for task in self.state.tasks:
            task.cancel()
        for acceptor in acceptors:
            await acceptor.wait_closed()

    def leave(self) -> None:
        """Makes each connection close after its next answer."""
        self._is_leaving = True

    def close_connections(self) -> None:
        """Closes idle connections at once, and other connections after the current answer. New
        connections are still accepted."""
        for connection in list(self.state.connections):
            connection.finish()

    def stop(self) -> None:
        """Makes `run_until_stopped` stop serving and return."""
        self._stopping.set()

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> Acceptor:
        acceptor = Acceptor(
            listener,
            lambda place: HttpConnection(self.state, place),
            tls=tls,
            handshake_limit_s=self.state.limits.head_limit_s,
            places=self.state.places,
            refusals=self.state.refusals,
        )
        acceptor.start(BACKLOG)
        return acceptor

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])  # the last header of each name
        call = begin_call(_text(headers.get(_ID)), timeout=_text(headers.get(_TIMEOUT)))

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (_ID, call.shown_id.encode())]
                if self._is_leaving:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        await self._app(scope, receive, send_on)


_ID, _TIMEOUT = ID_HEADER.encode(), TIMEOUT_HEADER.encode()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
