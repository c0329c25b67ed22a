"""Accepts connections from a listening socket. From the moment it is accepted, each connection
counts against the limit on the connections of the server.

asyncio's own servers report a TLS connection only after the handshake, so connections in a
handshake could be neither counted nor closed early. If no file descriptor is left, uvloop's servers
close the connections that wait to be accepted; with this module such connections wait until a
descriptor is free.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from services.common.outage_log import OutageLog
from services.frontend.http.transport.connection_limits import ConnectionPlace, ConnectionPlaces
from services.frontend.request.refusals import Refusal, Refusals

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
"""Largest number of connections that are accepted in one pass of the event loop. Accepting this
many takes two milliseconds, so a flood of new connections does not delay the open connections."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

RETRY_S = 0.5
"""Seconds for which no connection is accepted after the process has run out of a resource, such as
file descriptors."""

Protocols = Callable[[ConnectionPlace | None], asyncio.Protocol]


class Acceptor:
    """Accepts connections from a listening socket until the acceptor is closed."""

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
        """Prepares to accept connections. `make_protocol` is called for each connection and returns
        the connection's protocol. The argument of `make_protocol` is the place that the connection
        takes in `places`, or None if all places are taken."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_limit_s = handshake_limit_s
        self._places = places
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._exhaustion = OutageLog(
            log,
            failing="connections cannot be accepted",
            works="connections are accepted again",
            counted="attempts failed",
        )

    def start(self, backlog: int) -> None:
        """Begins to listen and to accept connections."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Stops accepting connections, and ends the connections whose handshake is not complete."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until the connections whose handshake was not complete have ended."""
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
                    self._exhaustion.failed(error.strerror)
                    self._refusals[Refusal.CONNECTIONS] += 1
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(RETRY_S, self._resume)
                    return
                continue  # the client has disconnected
            self._exhaustion.worked()
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        place = self._places.enter(lambda: _hang_up(accepted))
        if place is None and self._tls is not None:
            accepted.close()  # a refusal would need a handshake, which costs most
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
        except OSError as error:  # no TLS, a handshake that timed out, or a lost client
            is_late = isinstance(error, ConnectionAbortedError)
            self._refusals[Refusal.HEAD_TIMEOUT if is_late else Refusal.MALFORMED] += 1
            if place is not None:
                place.leave()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
