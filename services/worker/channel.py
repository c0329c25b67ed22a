"""The socket pairs between a controller and one of its ranks, which carry frames.

A frame has a kind and a payload: a protobuf message or UTF-8 text, as `MessageKind` says, never a
pickle. The rank's end blocks; the controller's end is a protocol on the event loop.

There are two pairs. The first is for work, and the rank's main thread reads it between iterations.
The second is for what must not wait that long: heartbeats from the rank, and the order to leave an
epoch. A thread of its own serves it (`rank.lifeline`).
"""

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import cast

HEADER = struct.Struct("<BI")  # kind, length of the payload in bytes
READ_BYTES = 2**18

MAX_PAYLOAD_BYTES = 2**28
"""Bytes of a frame's payload at most; plans, the largest, are bounded by what gRPC takes."""


class MessageKind(IntEnum):
    """The kind of a frame, with its direction and its payload."""

    JOIN = 1
    """To the rank: a JoinPipelineRequest."""
    PLAN = 2
    """To the rank: a RunIterationsRequest."""
    PROGRESS = 3
    """From the rank: bytes loaded and bytes in all, as two decimal numbers."""
    LOADED = 4
    """From the rank: a DescribeResponse; its weights are in memory."""
    JOINED = 5
    """From the rank: the epoch it has joined, as a decimal number."""
    REPORT = 6
    """From the rank: a WatchStageResponse."""
    NOT_JOINED = 7
    """From the rank: an epoch as a decimal number, a space, and why it was not joined, as text."""
    FAILURE = 8
    """From the rank: the reason for which it is about to end, as text."""
    HEARTBEAT = 9
    """From the rank, on the second pair, without a payload: it runs."""
    LEAVE = 10
    """To the rank, on the second pair: an epoch as a decimal number; all before it are over."""
    TRACE = 11
    """From the rank: an IterationTrace, of an iteration whose plan has a trace context."""
    PROFILE = 12
    """To the rank: a number of iterations, a space, and the file to write their profile to; 0 calls
    off the profile that is being taken."""
    PROFILED = 13
    """From the rank: the profile is written."""
    NOT_PROFILED = 14
    """From the rank: the reason for which there is no profile, as text."""
    SETTINGS = 15
    """To a rank that was started without: its RankSettings as JSON, before anything else."""
    REFUSAL = 16
    """From the rank: a setting or a file with which it cannot start, as text; it ends."""


_KINDS = frozenset(MessageKind)


class BrokenFrame(ValueError):
    """The bytes are no frame, so where the next one begins is not known: the other end is broken,
    and the connection useless."""


class ChannelClosed(Exception):
    """The other end is gone."""


class FrameBuffer:
    """A buffer of received bytes, from which whole frames are taken."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds received bytes."""
        self._data += data

    def take(self) -> tuple[MessageKind, bytes] | None:
        """Takes the next whole frame, or returns None if there is none.

        Raises:
            BrokenFrame: its kind is unknown, or it is to be longer than any; nothing is kept for
                it.
        """
        if len(self._data) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._data)
        if kind not in _KINDS or length > MAX_PAYLOAD_BYTES:
            raise BrokenFrame(f"a frame of kind {kind} and {length} bytes")
        end = HEADER.size + length
        if len(self._data) < end:
            return None
        payload = bytes(self._data[HEADER.size : end])
        del self._data[:end]
        return MessageKind(kind), payload

    def frames(self) -> Iterator[tuple[MessageKind, bytes]]:
        """Takes all whole frames."""
        while (frame := self.take()) is not None:
            yield frame


def encode(kind: MessageKind, payload: bytes) -> bytes:
    """Returns the bytes of a frame."""
    return HEADER.pack(kind, len(payload)) + payload


class RankEnd:
    """The rank's end of a pair: it blocks, and is for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = FrameBuffer()

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Sends a frame.

        Raises:
            ChannelClosed: the controller is gone.
        """
        try:
            self._connection.sendall(encode(kind, payload))
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float) -> tuple[MessageKind, bytes] | None:
        """Returns the next frame, or None if no bytes came in time; with 0 it does not wait.

        Raises:
            ChannelClosed: the controller is gone.
        """
        while (frame := self._buffer.take()) is None:
            if not select.select([self._connection], [], [], timeout_s)[0]:
                return None
            try:
                data = self._connection.recv(READ_BYTES)
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._buffer.feed(data)
        return frame


class ControllerEnd(asyncio.Protocol):
    """The controller's end of a pair: calls back for each frame, and once when the rank is gone."""

    def __init__(
        self,
        on_message: Callable[[MessageKind, bytes], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Queues a frame; never waits. The pipeline's depth bounds what lies in the queue."""
        self._transport.write(encode(kind, payload))

    def close(self) -> None:
        """Closes the socket; a rank that is idle ends itself then."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer.feed(data)
        for kind, payload in self._buffer.frames():
            self._on_message(kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()
