"""The two socket pairs between a controller and one of its ranks, which carry frames.

A frame has a kind and a payload. The payload is a protobuf message or UTF-8 text, as `MessageKind`
says, and never a pickle. The rank's end has blocking calls; the controller's end is an asyncio
protocol.

The first pair is for work, and the rank's main thread reads it between iterations. The second pair
is for messages that must not wait that long: heartbeats of the rank, the order to leave an epoch,
and grammars to compile. A separate thread of the rank serves the second pair (`rank.lifeline`).
"""

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import cast

HEADER = struct.Struct("<BI")  # kind, length of the payload in bytes
READ_BYTES = 2**18

MAX_PAYLOAD_BYTES = 2**28
"""Largest number of bytes of a payload. The largest payloads are plans, which stay below this size
because gRPC limits the size of a plan."""


class MessageKind(IntEnum):
    """The kind of a frame, which determines the frame's direction and the form of its payload."""

    JOIN = 1
    """To the rank: a JoinPipelineRequest."""
    PLAN = 2
    """To the rank: a RunIterationsRequest."""
    PROGRESS = 3
    """From the rank: bytes loaded so far and total bytes, as two decimal numbers."""
    LOADED = 4
    """From the rank, when the rank's weights are in memory: a DescribeResponse."""
    JOINED = 5
    """From the rank: the epoch that the rank has joined as a decimal number, a space, and a
    JoinPipelineResponse. If the rank's keys and values outlive epochs, `stored_kv` has one entry,
    which describes them."""
    REPORT = 6
    """From the rank: a WatchStageResponse."""
    NOT_JOINED = 7
    """From the rank: the epoch that the rank could not join as a decimal number, a space, and the
    reason as text."""
    FAILURE = 8
    """From the rank, just before it ends because of an error: the reason, as text."""
    HEARTBEAT = 9
    """From the rank, on the second pair: a sign that the rank is alive. The payload is empty."""
    LEAVE = 10
    """To the rank, on the second pair: an epoch as a decimal number. The rank must leave any older
    epoch."""
    TRACE = 11
    """From the rank: the IterationTrace of an iteration whose plan has a trace context."""
    PROFILE = 12
    """To the rank: a number of iterations, a space, and the path of the file for the profile of
    these iterations. The number 0 cancels the profile that is being taken."""
    PROFILED = 13
    """From the rank, when a profile has been written: the path of the profile."""
    NOT_PROFILED = 14
    """From the rank: the reason for which a profile could not be written, as text."""
    PLACE = 15
    """To the rank, as the first message: the index of the rank's stage and the number of stages, as
    two decimal numbers."""
    REFUSAL = 16
    """From the rank, just before it ends: why it cannot start, as text that names the setting or
    file."""
    TRAITS = 17
    """From the rank, as the first message: a DescribeResponse with the rank's traits, the
    properties that must be equal on all stages of a pipeline."""
    PREPARE_GRAMMAR = 18
    """To the rank, on the second pair: a PrepareGrammarRequest."""
    GRAMMAR_PREPARED = 19
    """From the rank, when the rank has compiled a grammar or has failed to: a
    PrepareGrammarResponse."""
    CHECKPOINT = 20
    """From the first rank of the first stage, before that rank loads its weights: the rows of a
    CheckpointReport, as JSON."""


_KINDS = frozenset(MessageKind)

URGENT = frozenset({MessageKind.LEAVE, MessageKind.PREPARE_GRAMMAR})
"""Kinds of messages to the rank that travel on the second pair."""


class BrokenFrame(ValueError):
    """The received bytes are not a valid frame. The connection must then be closed, because the
    start of the next frame is unknown."""


class ChannelClosed(Exception):
    """The other end of the channel is closed."""


class FrameBuffer:
    """A buffer of received bytes, from which complete frames are taken."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Appends received bytes to the buffer."""
        self._data += data

    def take(self) -> tuple[MessageKind, bytes] | None:
        """Removes and returns the next message (frame). Returns None if no message has arrived
        completely.

        Raises:
            BrokenFrame: the frame's kind is unknown, or its length is above MAX_PAYLOAD_BYTES. No
                memory is allocated for the frame.
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
        """Yields and removes all complete frames."""
        while (frame := self.take()) is not None:
            yield frame


def encode(kind: MessageKind, payload: bytes) -> bytes:
    """Returns a message as the bytes of a frame: its header and its payload."""
    return HEADER.pack(kind, len(payload)) + payload


class RankEnd:
    """The rank's end of a socket pair, with blocking calls. Only one thread may receive; any thread
    may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = FrameBuffer()
        self._sending = threading.Lock()  # a frame may be sent in several pieces

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Sends a message (frame) to the controller, and waits until it is written.

        Raises:
            ChannelClosed: the controller is gone.
        """
        try:
            with self._sending:
                self._connection.sendall(encode(kind, payload))
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float) -> tuple[MessageKind, bytes] | None:
        """Returns the next message (frame). Returns None if no bytes arrive within `timeout_s`.
        With a timeout of 0, returns without waiting.

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
    """The controller's end of a socket pair. Calls `on_message` for each received frame, and
    `on_closed` once when the rank has closed its end."""

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
        """Queues a message (frame) for sending, and never waits. The queue stays short, because
        only a few iterations are in flight."""
        self._transport.write(encode(kind, payload))

    def close(self) -> None:
        """Closes the socket. The rank then ends when it is idle."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer.feed(data)
        for kind, payload in self._buffer.frames():
            self._on_message(kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()
