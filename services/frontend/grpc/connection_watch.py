"""Holds back, and ends, connections of the public gRPC API that send what is no part of a call.

gRPC limits what a call may send. It does not limit what comes beside: of headers that do not end it
keeps every byte, 3 GiB of 32 connections in ten seconds, whatever its limits of metadata say. Nor
can it be asked what a connection has sent; the kernel can. So the bytes that the kernel has
received on each connection are compared, many times a second, with those of the calls that came of
them. A relay before gRPC that reads each frame's header would know at once, and take 8 µs of a
processor for each message that is streamed; this takes nothing of a message.

gRPC reads for all connections, the scheduler's among them, in a few threads. A thread stays with a
connection for as long as there is something to read, and what others have sent waits. So the kernel
keeps little for a connection until it is read, which makes turns short. From one that has sent too
much it takes nothing more until the calls begin that this belongs to, or the connection ends:
whoever is cut off at once comes back at once.

The kernel is asked through the process's own file descriptors; outside Linux nobody is watched.
"""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc.aio

from services.common.exchange import Metadata
from services.common.resident_memory import resident_bytes
from services.common.rpc import MAX_STREAMS, WINDOW_BYTES
from services.frontend.grpc import server_sockets
from services.frontend.grpc.server_sockets import Address, Counts
from services.frontend.request.refusals import Refusal, Refusals

PERIOD_S = 0.05
"""Seconds between two looks at the connections."""

MAX_PART = 0.02
"""Part of the time that the looks may take, unless memory grows: with more than 50 connections
there are fewer of them."""

GROWTH_BYTES = 4 * 2**20
"""Growth of the process's memory for which the connections are looked at before it is time."""

RECEIVE_BYTES = 8 * 2**10
"""Bytes that the kernel keeps for a connection until gRPC reads them, instead of several megabytes:
0.3 ms of a processor in empty settings, which cost most. It is more where the way is long, which
has turns apart: what comes at PATH_BYTES_PER_S until a client hears of room."""

PATH_BYTES_PER_S = 2 * 2**20
"""Bytes that a client on a long path may send each second."""
MAX_RTT_US = 10**7
"""Microseconds on a path, at most; the kernel says more while it does not know."""
MAX_RECEIVE_BYTES = 64 * 2**10 - 1
"""The largest window of a connection whose first one was too small to agree on a scale."""

HEAD_BYTES = 4 * 2**10
"""Bytes of a call's metadata, as honest clients send them at most."""

MAX_DEBT_BYTES = MAX_STREAMS * (WINDOW_BYTES + HEAD_BYTES)
"""Bytes that a connection may have sent beyond those of its calls, or it ends: what gRPC holds of
those that have not begun here."""

QUIET_DEBT_BYTES = 64 * 2**10
"""Bytes of these with which a connection is held back, if none of its calls began for QUIET_S."""

QUIET_S = 2 * PERIOD_S
"""Seconds for which it must have been quiet, not counting those that this process is late."""

HELD_S = 3.0
"""Seconds that a connection may be held back before it ends."""

MAX_DEBTS_BYTES = 64 * 2**20
"""Bytes that all connections together may have sent beyond those of their calls. Connections that
have sent most end."""

BYTES_PER_S = 16 * 2**10
"""Bytes that a connection may send beside its calls each second: pings, windows, settings."""

CALL_BYTES = 256
"""Bytes of a call's frames, without its metadata and its message."""


@dataclass(slots=True)
class _Connection:
    """How things stood with a connection when it was looked at."""

    n_acked: int = 0
    n_received: int = 0
    receive_bytes: int = RECEIVE_BYTES
    """Bytes that the kernel keeps for it."""
    debt_bytes: float = 0.0
    """Bytes that it has sent, and that nothing accounts for."""
    is_held: bool = False
    """Whether it is held back."""
    held_for_s: float = 0.0
    """Seconds for which it has been."""
    quiet_for_s: float = 0.0
    """Seconds for which no call of it has begun."""


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
        for listener in server_sockets.sockets_at(port):
            with contextlib.suppress(OSError):  # a connection that has gone
                # Connections inherit it. gRPC has an option for this, and only clients obey it.
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
        """Holds back and ends connections to a port that have sent too much. The last look was
        `for_s` ago; `late_s` of these this process did something else, and calls may have come
        that have not begun."""
        own_s = for_s - late_s
        earned, receiving = _by_address(self._earned), _by_address(self._receiving)
        self._earned.clear()
        known, self._connections = self._connections, {}
        debts: dict[Address, float] = {}
        for connection, address in server_sockets.connections_to(port):
            with contextlib.suppress(OSError):  # it has gone
                counts = server_sockets.counts_of(connection)
                state = known.get(address)
                # A client may come from an address again.
                is_new = state is None or counts.n_received < state.n_received
                if state is None or is_new:
                    state = _Connection()
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
        """Returns the clients whose connections end, of those that have sent too much."""
        ending, n_bytes = set[Address](), sum(debts.values())
        for address in sorted(debts, key=debts.__getitem__, reverse=True):
            is_too_much = debts[address] > MAX_DEBT_BYTES or n_bytes > MAX_DEBTS_BYTES
            if is_too_much or self._connections[address].held_for_s > HELD_S:
                ending.add(address)
                n_bytes -= debts[address]
        return ending


def _by_address(counts: Counter[str]) -> Counter[Address]:
    """Returns counts by clients' addresses instead of what gRPC calls them: `ipv4:127.0.0.1:80`,
    `ipv6:%5B::1%5D:80`."""
    found: Counter[Address] = Counter()
    for peer, count in counts.items():
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdecimal():
            host = host.strip("[]").partition("%")[0]  # without the link that it is local to
            found[host.removeprefix("::ffff:"), int(port)] += count
    return found


def receive_bytes(min_rtt_us: int) -> int:
    """Returns the bytes that the kernel should keep for a connection over a path that takes so many
    microseconds there and back."""
    is_known = min_rtt_us <= MAX_RTT_US
    on_path = int(1e-6 * min_rtt_us * PATH_BYTES_PER_S) if is_known else 0
    return min(max(RECEIVE_BYTES, on_path), MAX_RECEIVE_BYTES)


def _note_counts(state: _Connection, counts: Counts, allowed: float) -> None:
    """Brings the state of a connection up to date, which was allowed to send so many bytes."""
    # Whoever reads answers opens windows and sends pings for them.
    allowed += (counts.n_acked - state.n_acked) / 2
    n_received = counts.n_received - state.n_received
    state.debt_bytes = max(0.0, state.debt_bytes + n_received - allowed)
    state.n_acked, state.n_received = counts.n_acked, counts.n_received


def _make_room(state: _Connection, connection: socket.socket, min_rtt_us: int) -> None:
    """Has the kernel keep more for a connection if its path is longer than was known."""
    if (n_bytes := receive_bytes(min_rtt_us)) > state.receive_bytes:
        server_sockets.set_receive_bytes(connection, n_bytes)
        state.receive_bytes = n_bytes


def _hold(state: _Connection, connection: socket.socket, address: Address, for_s: float) -> None:
    """Holds a connection back, or goes on with it for another `for_s`; where the kernel cannot, it
    ends at the same time."""
    if state.is_held:
        state.held_for_s += for_s
    else:
        state.is_held = True
        server_sockets.hold(connection, address)


def _release(state: _Connection, connection: socket.socket, address: Address) -> None:
    """Holds a connection back no longer, if it was."""
    if state.is_held:
        server_sockets.release(connection, address)
        state.is_held, state.held_for_s = False, 0.0
