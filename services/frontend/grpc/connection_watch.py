"""Ends connections of the public gRPC API that send what is no part of a call.

gRPC limits what a call may send. It does not limit what comes beside: of headers that do not end it
keeps every byte, 3 GiB of 32 connections in ten seconds, whatever its limits of metadata say. Nor
can it be asked what a connection has sent; the kernel can. So the bytes that the kernel has
received on each connection are compared, a few times a second, with those of the calls that came of
them. A relay before gRPC that reads each frame's header would know at once, and take 8 µs of a
processor for each message that is streamed; this takes nothing of a message.

Until it is looked at, a connection may send as fast as it can. gRPC reads all that has come, and
nothing else of that connection's in between, in a thread of the few that read for all connections,
the scheduler's among them. So the kernel keeps little for each: everybody's turn is short.

The kernel is asked through the process's own file descriptors; outside Linux nobody is watched.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc.aio

from services.common.exchange import Metadata
from services.common.resident_memory import resident_bytes
from services.common.rpc import MAX_STREAMS, WINDOW_BYTES
from services.frontend.request.refusals import Refusal, Refusals

LOOK_S = 0.05
"""Seconds between two looks at the process's memory."""

GROWTH_BYTES = 4 * 2**20
"""Growth of it for which the connections are looked at before it is time."""

PERIOD_S = 0.25
"""Seconds between two looks at the connections, at least; more where one takes over 5 ms."""

MAX_PART = 0.02
"""Part of the time that the looks may take."""

RECEIVE_BYTES = 128 * 2**10
"""Bytes that the kernel keeps for a connection until gRPC reads them, instead of several megabytes:
5 ms of a processor in empty settings, which cost most, and a message of 4 MiB in 3 s over a path of
100 ms."""

HEAD_BYTES = 4 * 2**10
"""Bytes of a call's metadata, as honest clients send them at most."""

MAX_DEBT_BYTES = MAX_STREAMS * (WINDOW_BYTES + HEAD_BYTES)
"""Bytes that a connection may have sent beyond those of its calls: what gRPC holds of those that
have not begun here."""

BYTES_PER_S = 16 * 2**10
"""Bytes that a connection may send beside its calls each second: pings, windows, settings."""

CALL_BYTES = 256
"""Bytes of a call's frames, without its metadata and its message."""

FDS = Path("/proc/self/fd")

ACKED_AND_RECEIVED = struct.Struct("=QQ")
ACKED_OFFSET = 120
"""Offset of `tcpi_bytes_acked`, before `tcpi_bytes_received`, in `struct tcp_info` of
linux/tcp.h."""

TCP_INFO_BYTES = ACKED_OFFSET + ACKED_AND_RECEIVED.size

LIBRARY = ctypes.CDLL(None)
NO_ADDRESS = bytes(16)
"""A `struct sockaddr` of the family AF_UNSPEC: connecting to it resets a connection."""

Address = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """How things stood with a connection when it was looked at."""

    n_acked: int = 0
    n_received: int = 0
    debt_bytes: float = 0.0
    """Bytes that it has sent, and that nothing accounts for."""


class ConnectionWatch:
    """The bytes that calls account for, and the end of connections that send more."""

    def __init__(self, refusals: Refusals, *, max_message_bytes: int) -> None:
        self._refusals = refusals
        self._max_message_bytes = max_message_bytes
        self._earned: Counter[str] = Counter()
        """Bytes of calls since the last look, by gRPC's word for their client's address."""
        self._receiving: Counter[str] = Counter()
        """Messages that are on their way."""
        self._connections: dict[Address, _Connection] = {}

    def note_call(self, peer: str, metadata: Metadata) -> None:
        """Accounts for a call that has begun, of a client that gRPC calls `peer`."""
        n_bytes = sum(len(key) + len(value) for key, value in metadata)
        # Its message may lie in the window for as long as it waits, or is refused unread.
        self._earned[peer] += n_bytes + CALL_BYTES + WINDOW_BYTES

    async def read(self, context: Any) -> Any:
        """Returns a call's next message, or gRPC's EOF, and accounts for it; for one that does not
        come to its end as if it had been the largest."""
        peer, n_bytes = context.peer(), self._max_message_bytes
        self._receiving[peer] += 1
        try:
            message = await context.read()
            if message is not grpc.aio.EOF:
                n_bytes = len(message)
            return message
        finally:
            self._earned[peer] += n_bytes + n_bytes // 16  # with its frames, and TLS
            self._receiving[peer] -= 1
            if not self._receiving[peer]:
                del self._receiving[peer]

    async def run(self, port: int) -> None:
        """Watches the connections to a port of this machine, until cancelled. Those that come from
        now on may send little at a time."""
        looked_at, wait_s, size = time.monotonic(), 0.0, resident_bytes()
        if not size:  # not Linux
            return
        for listener in _sockets_at(port):
            # Its connections inherit it. gRPC has an option for this and obeys it only for clients.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now < looked_at + wait_s and resident_bytes() < size + GROWTH_BYTES:
                continue
            self.look(port, now - looked_at)
            looked_at, size = now, resident_bytes()
            wait_s = max(PERIOD_S, (time.monotonic() - now) / MAX_PART)

    def look(self, port: int, for_s: float) -> None:
        """Ends connections to a port that have sent too much; the last look was `for_s` ago."""
        earned, receiving = _by_address(self._earned), _by_address(self._receiving)
        self._earned.clear()
        known, self._connections = self._connections, {}
        for connection, address in _connections_to(port):
            allowed = for_s * BYTES_PER_S + earned[address]
            state = self._connections[address] = known.get(address) or _Connection()
            with contextlib.suppress(OSError):  # it has gone
                debt_bytes = _note_counts(state, connection, allowed)
                if debt_bytes > MAX_DEBT_BYTES + receiving[address] * self._max_message_bytes:
                    self._refusals[Refusal.HEAD_TOO_LARGE] += 1
                    _cut(connection, address)


def _connections_to(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """Yields this process's connections to a port, and their clients' addresses."""
    for connection in _sockets_at(port):
        with contextlib.suppress(OSError):  # it listens, or has gone
            yield connection, _address_of(connection)


def _sockets_at(port: int) -> Iterator[socket.socket]:
    """Yields this process's sockets of a port. The descriptors are gRPC's, and stay open."""
    for descriptor in map(int, os.listdir(FDS)):
        with contextlib.suppress(OSError):  # no socket, or gone
            # Named AF_INET6, whose addresses are longer, it tells both kinds. Neither this nor
            # `detach` changes whether the socket blocks, which it shares with gRPC; `dup` would.
            found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
            try:
                name = found.getsockname()
                if isinstance(name, tuple) and name[1] == port:
                    yield found
            finally:
                found.detach()


def _address_of(connection: socket.socket) -> Address:
    host, port = connection.getpeername()[:2]
    return host.removeprefix("::ffff:"), port


def _by_address(counts: Counter[str]) -> Counter[Address]:
    """Returns counts by clients' addresses instead of what gRPC calls them: `ipv4:127.0.0.1:80`,
    `ipv6:%5B::1%5D:80`."""
    found: Counter[Address] = Counter()
    for peer, count in counts.items():
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdecimal():
            found[host.strip("[]").removeprefix("::ffff:"), int(port)] += count
    return found


def _note_counts(state: _Connection, connection: socket.socket, allowed: float) -> float:
    """Brings the state of a connection up to date, and returns its debt."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    n_acked, n_received = ACKED_AND_RECEIVED.unpack_from(info, ACKED_OFFSET)
    # Whoever reads answers opens windows and sends pings for them.
    allowed += (n_acked - state.n_acked) / 2
    state.debt_bytes = max(0.0, state.debt_bytes + n_received - state.n_received - allowed)
    state.n_acked, state.n_received = n_acked, n_received
    return state.debt_bytes


def _cut(connection: socket.socket, address: Address) -> None:
    """Resets a connection and drops what it has sent: gRPC does not always look at the end of one
    that goes on sending, as `shutdown` would leave it. gRPC closes the descriptor."""
    if _address_of(connection) == address:  # else it has become another's
        LIBRARY.connect(connection.fileno(), NO_ADDRESS, len(NO_ADDRESS))
