"""HTTP/2 as an attacker writes it: frames by hand, which no library would send."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Self

from tests.hostile.attack import Answers
from tests.hostile.target import Target

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
MAX_FRAME_BYTES = 2**14


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns one frame."""
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def settings(**values: int) -> bytes:
    """Returns the frame that sets the initial window, or nothing."""
    payload = b"".join(
        INITIAL_WINDOW_SIZE.to_bytes(2, "big") + value.to_bytes(4, "big")
        for value in values.values()
    )
    return frame(SETTINGS, 0, 0, payload)


def block(target: Target, path: str, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
    """Returns the header block of a call: literals, not indexed, not compressed."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", target.grpc),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *([] if target.api_key is None else [("authorization", f"Bearer {target.api_key}")]),
        *metadata,
    ]
    return b"".join(
        b"\0" + _string(name.encode()) + _string(value.encode()) for name, value in headers
    )


def message(content: bytes) -> bytes:
    """Returns a message of gRPC with its prefix."""
    return b"\0" + len(content).to_bytes(4, "big") + content


def call(stream: int, header_block: bytes, content: bytes) -> bytes:
    """Returns the frames of a call with one small message."""
    return frame(HEADERS, END_HEADERS, stream, header_block) + frame(
        DATA, END_STREAM, stream, message(content)
    )


class Connection:
    """An attacker's HTTP/2 connection. Received frames are counted by their kind and dropped."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_frames: Counter[int] = Counter()
        self._reader = reader
        self._writer = writer
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, target: Target, **values: int) -> Self:
        """Opens a connection to the public gRPC API.

        Raises:
            OSError: it is refused.
        """
        connection = cls(*await target.connect(target.grpc))
        await connection.send(PREFACE + settings(**values))
        return connection

    async def send(self, data: bytes) -> None:
        """Sends bytes; raises OSError when the server has hung up."""
        if self._reading.done():
            raise ConnectionResetError("the server hung up")
        self._writer.write(data)
        await self._writer.drain()

    async def is_closed_within(self, limit_s: float) -> bool:
        """Returns whether the server hangs up in that time."""
        done, _ = await asyncio.wait([self._reading], timeout=limit_s)
        return bool(done)

    async def close(self) -> None:
        """Closes the connection at once."""
        self._reading.cancel()
        self._writer.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                header = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(header[:3], "big"))
                self.n_frames[header[3]] += 1
                if header[3] == SETTINGS and not header[4] & ACK:
                    self._writer.write(frame(SETTINGS, ACK, 0))
                if header[3] == PING and not header[4] & ACK:
                    self._writer.write(frame(PING, ACK, 0, payload))


async def flood(connection: Connection, data: bytes, times: int) -> Answers:
    """Sends the same bytes over and over, until the server hangs up."""
    try:
        for _ in range(times):
            await connection.send(data)
    except OSError:
        return Counter(["closed"])
    return Counter(["taken"])


def _string(value: bytes) -> bytes:
    return _integer(len(value), 7) + value


def _integer(value: int, n_bits: int) -> bytes:
    limit = 2**n_bits - 1
    if value < limit:
        return bytes((value,))
    value, encoded = value - limit, bytearray((limit,))
    while value >= 128:
        encoded.append(value % 128 + 128)
        value //= 128
    encoded.append(value)
    return bytes(encoded)
