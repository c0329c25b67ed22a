"""Accepts connections from a listening socket, each with a place from its first moment.

asyncio's own servers report a TLS connection only after its handshake, so that connections in their
handshake could neither be counted nor be ended early. And when no file descriptor is left, the
servers of uvloop close connections that wait to be accepted; here they wait until there is one.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from services.frontend.http.transport.connection_limits import ConnectionPlace, ConnectionPlaces
from services.frontend.request.refusals import Refusal, Refusals

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
"""Number of connections that are accepted in one pass of the event loop: two milliseconds of work,
so that a flood of them does not hold up other connections."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

RETRY_S = 0.5
"""Seconds without accepting after a resource is exhausted."""

Protocols = Callable[[ConnectionPlace | None], asyncio.Protocol]


class Acceptor:
    """Accepts connections until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Protocols,
        *,
        tls: ssl.SSLContext | None,
        handshake_limit_s: float,
        places: ConnectionPlaces,
        refusals: Refusals,
    ) -> None:
        """Prepares for connections, each of which speaks the protocol that `make_protocol` returns.
        That gets the place of the connection, or None if there is none."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_limit_s = handshake_limit_s
        self._places = places
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self, backlog: int) -> None:
        """Begins to listen and to accept."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accepts no more connections, and ends those whose handshake is not over."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until the connections that were being opened have ended."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    log.warning("cannot accept connections for %g s: %s", RETRY_S, error)
                    self._refusals[Refusal.CONNECTIONS] += 1
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(RETRY_S, self._resume)
                    return
                continue  # the client has gone already
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        place = self._places.enter(lambda: _hang_up(accepted))
        if place is None and self._tls is not None:
            accepted.close()  # a refusal would need a handshake, the most costly part
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._open(accepted, place))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, place: ConnectionPlace | None) -> None:
        limit_s = None if self._tls is None else self._handshake_limit_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(place),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=limit_s,
            )
        except OSError as error:  # no TLS, no end of its handshake, or the client has gone
            is_late = isinstance(error, ConnectionAbortedError)
            self._refusals[Refusal.HEAD_TIMEOUT if is_late else Refusal.MALFORMED] += 1
            if place is not None:
                place.leave()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
