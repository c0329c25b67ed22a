"""Holds back, and ends, connections of the public gRPC API that send bytes which are no part of a
call.

gRPC limits the bytes of a call, but not the other bytes of a connection. If a client sends headers
without end, gRPC keeps every byte, although it limits metadata: 32 connections fill 3 GiB in ten
seconds. gRPC does not report how many bytes a connection has sent, but the kernel does. So several
times per second, the bytes that the kernel has received on each connection are compared with the
bytes of the calls on that connection. The difference, bytes that belong to no call, is called the
connection's debt. A relay in front of gRPC that reads the header of each frame would notice such
bytes at once, but would cost 8 µs for each streamed message; this watch costs nothing per message.

gRPC reads for all connections, the scheduler's among them, in a few threads. A thread reads from
one connection as long as there are bytes to read, and other connections wait. The kernel's receive
buffer of each connection is therefore kept small: the thread soon reads from the next connection.
When a connection has sent too many bytes, it is held back: the kernel accepts no more
bytes from it. The kernel accepts bytes again when the calls to which the bytes belong have begun.
The connection is held back for a time and not ended at once, because a client whose connection is
ended connects again at once.

The kernel is asked through the process's own file descriptors, see `server_sockets.py`. Outside
Linux nothing is watched.
"""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from services.common.address import Address, of_grpc_peer
from services.common.exchange import Metadata
from services.common.resident_memory import resident_bytes
from services.common.rpc import MAX_STREAMS, WINDOW_BYTES
from services.frontend.grpc import server_sockets
from services.frontend.grpc.server_sockets import Counts
from services.frontend.request.refusals import Refusal, Refusals

PERIOD_S = 0.05
"""Seconds between two inspections of the connections."""

MAX_PART = 0.02
"""Largest fraction of the time that inspecting the connections may take, unless memory grows. With
more than 50 connections, inspections become rarer."""

GROWTH_BYTES = 4 * 2**20
"""Growth of the memory of the process, in bytes, at which the connections are inspected earlier
than planned."""

RECEIVE_BYTES = 8 * 2**10
"""Size in bytes of the receive buffer that the kernel keeps for a connection, instead of several
megabytes. gRPC takes 0.3 ms to read a full buffer of empty SETTINGS frames, the most expensive
kind. For a connection with a long round trip, the buffer is larger: it holds the bytes of one round
trip at PATH_BYTES_PER_S."""

PATH_BYTES_PER_S = 2 * 2**20
"""Bytes that a client with a long round trip must be able to send each second."""
MAX_RTT_US = 10**7
"""Longest round-trip time, in microseconds, that counts as a measurement. The kernel reports a
larger number while it has not measured the round trip."""
MAX_RECEIVE_BYTES = 64 * 2**10 - 1
"""Size of the largest receive buffer, in bytes. It is the largest TCP window without window
scaling. A connection whose first window is small does not negotiate window scaling."""

HEAD_BYTES = 4 * 2**10
"""Size of the largest metadata of a call that ordinary clients send, in bytes."""

MAX_DEBT_BYTES = MAX_STREAMS * (WINDOW_BYTES + HEAD_BYTES)
"""Debt (bytes that belong to no call) at which a connection is ended. A client may send this many
bytes for the largest number of calls of one connection, before this process has begun any of these
calls."""

QUIET_DEBT_BYTES = 64 * 2**10
"""Debt (bytes that belong to no call) at which a connection is held back, if none of its calls has
begun for QUIET_S."""

QUIET_S = 2 * PERIOD_S
"""Seconds without a new call after which a connection is held back if its debt exceeds
QUIET_DEBT_BYTES. Time in which this process was too busy to begin calls does not count."""

HELD_S = 3.0
"""Seconds that a connection may be held back before it is ended."""

MAX_DEBTS_BYTES = 64 * 2**20
"""Largest sum of the debts (bytes that belong to no call) of all connections. Beyond this limit,
the connections with the largest debts are ended."""

BYTES_PER_S = 16 * 2**10
"""Bytes that a connection may send each second in addition to its calls: pings, window updates,
settings."""

CALL_BYTES = 256
"""Bytes of a call's frames in addition to its metadata and its message."""


@dataclass(slots=True)
class _WatchedConnection:
    """The state of a connection as of its last inspection."""

    n_acked: int = 0
    n_received: int = 0
    receive_bytes: int = RECEIVE_BYTES
    """Size of the connection's receive buffer, in bytes."""
    debt_bytes: float = 0.0
    """Bytes that the connection has sent and that belong to no call."""
    is_held: bool = False
    """Whether the connection is held back at the moment: the kernel accepts nothing from it."""
    held_for_s: float = 0.0
    """Seconds for which the connection has been held back."""
    quiet_for_s: float = 0.0
    """Seconds for which no call of the connection has begun."""


class ConnectionWatch:
    """Compares the bytes that each connection sends with the bytes of its calls. Holds back, and
    ends, connections that send too many bytes that belong to no call."""

    def __init__(self, refusals: Refusals, *, max_message_bytes: int) -> None:
        self._refusals = refusals
        self._max_message_bytes = max_message_bytes
        self._earned: Counter[str] = Counter()
        """Bytes of the calls since the last inspection, for each client. The key is gRPC's name for
        the address of the client."""
        self._receiving: Counter[str] = Counter()
        """Number of messages that are being received from each client. The key is gRPC's name for
        the address of the client."""
        self._connections: dict[Address, _WatchedConnection] = {}

    def note_call(self, peer: str, metadata: Metadata) -> None:
        """Notes that a call has begun. `peer` is gRPC's name of the client."""
        n_bytes = sum(len(key) + len(value) for key, value in metadata)
        # Its message may fill the window of the call while the call waits, or is refused unread.
        self._earned[peer] += n_bytes + CALL_BYTES + WINDOW_BYTES

    async def read(self, context: Any) -> Any:
        """Returns the next message of a call, or gRPC's EOF, and counts the bytes of the message. A
        message that does not arrive completely counts as a message of the largest size."""
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
        """Watches the connections to a port of this machine, until cancelled. Connections that are
        accepted from now on get a small receive buffer. Outside Linux, returns at once."""
        looked_at, wait_s, size = time.monotonic(), 0.0, resident_bytes()
        if not size:  # not Linux
            return
        for listener in server_sockets.sockets_at(port):
            with contextlib.suppress(OSError):  # a connection that has gone
                # Accepted connections inherit the size. The option of gRPC works for clients only.
                server_sockets.set_receive_bytes(listener, RECEIVE_BYTES)
        while True:
            await asyncio.sleep(PERIOD_S)
            now = time.monotonic()
            if now < looked_at + wait_s and resident_bytes() < size + GROWTH_BYTES:
                continue
            for_s = now - looked_at
            self.look(port, for_s, late_s=max(0.0, for_s - PERIOD_S - wait_s))
            looked_at, size = now, resident_bytes()
            wait_s = (time.monotonic() - now) / MAX_PART

    def look(self, port: int, for_s: float, *, late_s: float = 0.0) -> None:
        """Inspects the connections to a port: holds back or closes connections that have sent too
        many bytes that belong to no call.

        `for_s` is the time since the last inspection, in seconds. If the process was busy, the
        inspection comes `late_s` seconds late; `for_s` includes these seconds. Calls that arrived
        during that delay may not have begun yet.
        """
        own_s = for_s - late_s
        earned, receiving = _by_address(self._earned), _by_address(self._receiving)
        self._earned.clear()
        known, self._connections = self._connections, {}
        debts: dict[Address, float] = {}
        for connection, address in server_sockets.connections_to(port):
            with contextlib.suppress(OSError):  # it has gone
                counts = server_sockets.counts_of(connection)
                state = known.get(address)
                # Another connection may have the same address as one before it.
                is_new = state is None or counts.n_received < state.n_received
                if state is None or is_new:
                    state = _WatchedConnection()
                self._connections[address] = state
                _note_counts(state, counts, for_s * BYTES_PER_S + earned[address])
                _make_room(state, connection, counts.min_rtt_us)
                debt = state.debt_bytes - receiving[address] * self._max_message_bytes
                state.quiet_for_s = 0.0 if is_new or earned[address] else state.quiet_for_s + own_s
                if debt > 0.0:
                    debts[address] = debt
                if debt > QUIET_DEBT_BYTES and state.quiet_for_s >= QUIET_S:
                    _hold(state, connection, address, own_s)
                else:
                    _release(state, connection, address)
        if ending := self._ending(debts):
            self._refusals[Refusal.HEAD_TOO_LARGE] += len(ending)
            for connection, address in server_sockets.connections_to(port):
                if address in ending:
                    server_sockets.cut(connection)

    def _ending(self, debts: Mapping[Address, float]) -> set[Address]:
        """Returns the addresses of the connections that must be ended. `debts` has the debt of each
        connection (its bytes that belong to no call), keyed by address. A connection must be ended
        if its debt exceeds MAX_DEBT_BYTES, or if it has been held back for more than HELD_S. If the
        sum of the remaining debts exceeds MAX_DEBTS_BYTES, the largest debts are ended first."""
        ending, n_bytes = set[Address](), sum(debts.values())
        for address in sorted(debts, key=debts.__getitem__, reverse=True):
            is_too_much = debts[address] > MAX_DEBT_BYTES or n_bytes > MAX_DEBTS_BYTES
            if is_too_much or self._connections[address].held_for_s > HELD_S:
                ending.add(address)
                n_bytes -= debts[address]
        return ending


def _by_address(counts: Counter[str]) -> Counter[Address]:
    """Returns `counts` with other keys: the address (host and port) of each client instead of
    gRPC's name for the client. Clients of Unix sockets are left out."""
    found: Counter[Address] = Counter()
    for peer, count in counts.items():
        if address := of_grpc_peer(peer):
            found[address] += count
    return found


def receive_bytes(min_rtt_us: int) -> int:
    """Returns the size of the receive buffer, in bytes, for a connection with a round trip of
    `min_rtt_us` microseconds."""
    is_known = min_rtt_us <= MAX_RTT_US
    on_path = int(1e-6 * min_rtt_us * PATH_BYTES_PER_S) if is_known else 0
    return min(max(RECEIVE_BYTES, on_path), MAX_RECEIVE_BYTES)


def _note_counts(state: _WatchedConnection, counts: Counts, allowed: float) -> None:
    """Updates the debt of a connection, the number of its bytes that belong to no call. Adds the
    bytes that the connection has sent since the last inspection. Subtracts the `allowed` bytes, and
    half of the bytes that the client has acknowledged since the last inspection. A debt is never
    negative."""
    # A client that reads answers sends window updates and pings for them.
    allowed += (counts.n_acked - state.n_acked) / 2
    n_received = counts.n_received - state.n_received
    state.debt_bytes = max(0.0, state.debt_bytes + n_received - allowed)
    state.n_acked, state.n_received = counts.n_acked, counts.n_received


def _make_room(state: _WatchedConnection, connection: socket.socket, min_rtt_us: int) -> None:
    """Enlarges the receive buffer of a connection if the buffer is too small for the round trip of
    the connection."""
    if (n_bytes := receive_bytes(min_rtt_us)) > state.receive_bytes:
        server_sockets.set_receive_bytes(connection, n_bytes)
        state.receive_bytes = n_bytes


def _hold(
    state: _WatchedConnection, connection: socket.socket, address: Address, for_s: float
) -> None:
    """Begins to hold back a connection: the kernel accepts no more bytes from the client. If the
    connection is held back already, adds `for_s` seconds to the time for which it has been held."""
    if state.is_held:
        state.held_for_s += for_s
    else:
        state.is_held = True
        server_sockets.hold(connection, address)


def _release(state: _WatchedConnection, connection: socket.socket, address: Address) -> None:
    """Makes the kernel accept packets of a connection again, if the connection was held back."""
    if state.is_held:
        server_sockets.release(connection, address)
        state.is_held, state.held_for_s = False, 0.0
