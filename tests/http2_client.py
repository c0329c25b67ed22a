"""A client of gRPC servers that decides, frame by frame, what to send and what to read."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from tests.limits import HANG_S


@dataclass
class Answer:
    """The received part of a call's answer."""

    data: bytes = b""
    metadata: dict[str, str] = field(default_factory=dict)
    is_over: bool = False

    @property
    def status(self) -> int | None:
        """The gRPC status of the call, or None if no status has been received."""
        code = self.metadata.get("grpc-status")
        return None if code is None else int(code)

    @property
    def messages(self) -> list[bytes]:
        """The messages that have been received completely."""
        messages, position = [], 0
        while position + 5 <= len(self.data):
            (length,) = struct.unpack_from(">I", self.data, position + 1)
            messages.append(self.data[position + 5 : position + 5 + length])
            position += 5 + length
        return messages


def framed(message: bytes) -> bytes:
    """Returns a message with the header that gRPC puts before each message."""
    return struct.pack(">BI", 0, len(message)) + message


class Http2Client:
    """A client with one connection. With a window of 0 it accepts no data of answers."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, window: int
    ) -> None:
        self._reader, self._writer = reader, writer
        configuration = H2Configuration(
            client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.h2 = H2Connection(configuration)
        self.h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: window,
                SettingCodes.MAX_HEADER_LIST_SIZE: 2**16,
            },
        )
        self.answers: dict[int, Answer] = {}
        self.error_code: int | None = None
        """Error code with which the server has closed the connection, or None."""
        self._changed = asyncio.Condition()
        self._is_closed = False

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, *, window: int = 65535) -> AsyncIterator[Self]:
        """Yields a client that is connected to a server, and closes the connection at the end of
        the block. `window` is the initial window of each stream in bytes."""
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)), window=window)
        client.h2.initiate_connection()
        client.flush()
        reading = asyncio.ensure_future(client._read())
        try:
            yield client
        finally:
            reading.cancel()
            client._writer.close()
            with suppress(asyncio.CancelledError):
                await reading  # raises if the server broke the rules of HTTP/2

    def begin(self, path: str, *, metadata: Sequence[tuple[str, str]] = ()) -> int:
        """Opens a stream and sends only its headers. Returns the number of the stream."""
        stream = self._open(path, metadata)
        self.flush()
        return stream

    def begin_unsent(self, path: str) -> int:
        """Opens a stream without sending its headers, which the caller sends as raw frames. Returns
        the number of the stream."""
        stream = self._open(path)
        self.h2.data_to_send()
        return stream

    def _open(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> int:
        stream = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "test"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        self.h2.send_headers(stream, [*headers, *metadata])
        self.answers[stream] = Answer()
        return stream

    def call(
        self, path: str, message: bytes = b"", *, metadata: Sequence[tuple[str, str]] = ()
    ) -> int:
        """Begins a call with a whole message. Returns the number of its stream."""
        stream = self.begin(path, metadata=metadata)
        self.h2.send_data(stream, framed(message), end_stream=True)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes) -> None:
        """Sends bytes of a call's message; more bytes may follow."""
        self.h2.send_data(stream, data)
        self.flush()

    def open_window(self, stream: int, n_bytes: int) -> None:
        """Allows the server to send `n_bytes` more bytes of an answer."""
        self.h2.increment_flow_control_window(n_bytes, stream)
        self.flush()

    def reset(self, stream: int) -> None:
        """Cancels a call."""
        self.h2.reset_stream(stream, error_code=8)
        self.flush()

    def send_raw(self, frames: bytes) -> None:
        """Sends the bytes of frames, which may be frames that no real client sends."""
        self._writer.write(frames)

    def flush(self) -> None:
        """Sends all bytes that wait to be sent."""
        self._writer.write(self.h2.data_to_send())

    async def wait_over(self, stream: int) -> Answer:
        """Waits until a call has ended or its connection is closed, and returns the answer."""
        async with asyncio.timeout(HANG_S), self._changed:
            await self._changed.wait_for(lambda: self.answers[stream].is_over or self._is_closed)
        return self.answers[stream]

    async def wait_messages(self, stream: int, n: int) -> list[bytes]:
        """Waits until at least `n` messages of a call have been received, and returns all of its
        messages."""
        async with asyncio.timeout(HANG_S), self._changed:
            await self._changed.wait_for(lambda: len(self.answers[stream].messages) >= n)
        return self.answers[stream].messages

    async def wait_window(self, n_bytes: int) -> None:
        """Waits until the server accepts at least `n_bytes` more bytes on the connection, or has
        closed the connection."""
        async with asyncio.timeout(HANG_S), self._changed:
            await self._changed.wait_for(
                lambda: self.h2.outbound_flow_control_window >= n_bytes or self._is_closed
            )

    async def wait_closed(self) -> None:
        """Waits until the server has closed the connection."""
        async with asyncio.timeout(HANG_S), self._changed:
            await self._changed.wait_for(lambda: self._is_closed)

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(2**16):
                if self._is_leaving:
                    continue
                for event in self._events(data):
                    self._note(event)
                self.flush()
                async with self._changed:
                    self._changed.notify_all()
        except ConnectionError:
            pass
        finally:
            self._is_closed = True
            async with self._changed:
                self._changed.notify_all()

    @property
    def _is_leaving(self) -> bool:
        """Whether the server has announced that it closes the connection. After this, h2 reads no
        frames."""
        return self.h2.state_machine.state is ConnectionState.CLOSED

    def _events(self, data: bytes) -> list[Event]:
        try:
            return self.h2.receive_data(data)
        except ProtocolError:
            if self._is_leaving:  # frames came together with the GOAWAY
                return []
            raise

    def _note(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.error_code = int(event.error_code or 0)
        stream = getattr(event, "stream_id", None)
        if stream not in self.answers:
            return
        answer = self.answers[stream]
        if isinstance(event, DataReceived):
            answer.data += event.data
        elif isinstance(event, ResponseReceived | TrailersReceived):
            answer.metadata |= {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, StreamEnded | StreamReset):
            answer.is_over = True
