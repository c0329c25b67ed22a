"""uvicorn as a guest in another's event loop: it neither handles signals nor sets up logs.

It ends in three steps, so that clients which keep connections open lose no request. After `leave`
every answer says that its connection closes, and clients make a new one, to whomever a load
balancer sends them then. `close_connections` closes those that nobody has used since, and has the
others close with their answer. `stop` ends it.
"""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of clients that connect at once."""

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. That is longer than most clients and proxies keep
theirs, so that they close it and no request meets a connection that is being closed."""

FINISH_S = 2
"""Seconds for writing out the last answers, after draining."""


GOODBYE_S = 1.0
"""Seconds that a client has to answer the goodbye of TLS; less than `FINISH_S`."""


MAX_GATHERED_BYTES = 2**16
"""Bytes that may be gathered for a connection within one round of the event loop; more are passed
on at once."""


class GatheringTransport(asyncio.Transport):
    """A transport that writes once per round of the event loop, everything that was written to it
    meanwhile.

    An iteration brings a token for each of many clients in one round. Their system calls then
    follow each other at the end of it instead of one after each token's work: who reads is woken
    once and not for every token, and what belongs together, such as an answer's last token and its
    end, goes out as one packet.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._gathered: list[bytes] = []
        self._n_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(bytes(data))
        self._n_bytes += len(data)
        if self._n_bytes > MAX_GATHERED_BYTES:
            self._flush()  # so that the transport can say that the client does not keep up

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._gathered.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        data, self._gathered, self._n_bytes = b"".join(self._gathered), [], 0
        if data and not self._transport.is_closing():
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """A client's connection. Over TLS, an end needs a goodbye from both sides, and a client that
    keeps an idle connection in a pool does not look at it: such a connection is not waited for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wraps the transport of a new connection."""
        super().connection_made(GatheringTransport(transport, self.loop))

    def shutdown(self) -> None:
        """Closes the connection if it is idle, else closes it with its answer."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(GOODBYE_S, self.transport.abort)


class HttpServer(uvicorn.Server):
    """Serves an app on a socket that is bound before anybody hears of it; with a context, only
    over TLS."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, *, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                self._run_app,
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FINISH_S,
                ssl_context_factory=None if tls is None else lambda _, __: tls,
            )
        )
        self._app = app
        self._listener = listener
        self._is_leaving = False

    async def run_until_stopped(self) -> None:
        """Serves until `stop`, then finishes what is being written."""
        await self.serve([self._listener])

    def leave(self) -> None:
        """From now on closes each connection with its next answer."""
        self._is_leaving = True

    def close_connections(self) -> None:
        """Closes idle connections now and the others with their answer; new ones may come."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def stop(self) -> None:
        """Makes `run_until_stopped` return soon."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: signals are the process's."""
        yield

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self._is_leaving and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_on)


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
        raise OSError(f"cannot listen on {address}: {error}") from error
    # Connections inherit it. asyncio's own loop sets it only on sockets that name their protocol,
    # which these do not: each event would wait for the client to acknowledge the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def address_of(listener: socket.socket, address: str) -> str:
    """Returns the `host:port` that clients can use, once it is known."""
    return f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
