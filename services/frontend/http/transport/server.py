"""The HTTP server: it serves an app on bound sockets until it is told to stop.

It ends in three steps, so that clients which keep connections open lose no request. After `leave`
every answer says that its connection closes, and clients make a new one, to whichever frontend a
load balancer sends them then. `close_connections` closes those that have had no request since, and
has the others close with their answer. `stop` ends it.
"""

import asyncio
import contextlib
import os
import socket
import ssl

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
"""Number of connections that may wait to be accepted: a burst of clients that connect at once."""

FINISH_S = 2.0
"""Seconds for sending the last answers, after draining."""


class HttpServer:
    """Serves an app on a socket that is bound before its address is announced; with a TLS context,
    only over TLS. It may serve on a Unix socket too, always without TLS, within the same limits."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        unix_listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        limits: ConnectionLimits | None = None,
        budget: MemoryBudget | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """Prepares to serve on the running event loop."""
        self._app = app
        self._listeners = [(listener, tls)]
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
        """What all its connections share."""

    async def run_until_stopped(self) -> None:
        """Serves until `stop`, then finishes what is being written."""
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
        """From now on closes each connection with its next answer."""
        self._is_leaving = True

    def close_connections(self) -> None:
        """Closes idle connections now and the others with their answer; new ones may come."""
        for connection in list(self.state.connections):
            connection.finish()

    def stop(self) -> None:
        """Makes `run_until_stopped` return soon."""
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
        headers = dict(scope["headers"])  # the last one of each name
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


def listen(address: str) -> socket.socket:
    """Returns a socket that listens on `host:port`; port 0 takes a free one.

    Raises:
        OSError: the address is taken or is not one of this machine's.
    """
    host, _, port = address.rpartition(":")
    try:
        listener = socket.create_server(
            (host.strip("[]"), int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {reason_of(error)}") from error
    # Accepted connections inherit the option. The loop of asyncio sets it only on sockets that name
    # their protocol, unlike these: each event would wait until the one before is acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def reason_of(error: OSError) -> str:
    """Returns the message of the system, without the address that asyncio and sockets add to it."""
    return os.strerror(error.errno) if error.errno else str(error)


def address_of(listener: socket.socket, address: str) -> str:
    """Returns the `host:port` at which clients reach a listener that was bound to `address`."""
    return f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
