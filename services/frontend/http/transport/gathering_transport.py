"""A transport that writes once in each pass of the event loop, and resumes reading in turn with
others."""

import asyncio
from collections.abc import Callable
from typing import Any

from services.frontend.loop_share import LoopShare

MAX_GATHERED_BYTES = 2**16
"""Number of bytes that may be gathered for a connection within one pass of the event loop; more are
written at once."""


class WriteRound:
    """The connections to which something was written in this pass of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._written: list[GatheringTransport] = []

    def add(self, transport: "GatheringTransport") -> None:
        """Makes a connection write what it gathers at the end of the pass."""
        if not self._written:
            self._loop.call_soon(self._end)
        self._written.append(transport)

    def _end(self) -> None:
        written, self._written = iter(self._written), []
        try:
            for transport in written:
                transport.flush()
        finally:
            for transport in written:  # those after one that failed
                self.add(transport)


class GatheringTransport(asyncio.Transport):
    """A transport that writes once in each pass of the event loop everything that was written to it
    meanwhile.

    An iteration brings a token for each of many clients in one pass. Their system calls then follow
    each other at its end instead of one after the work for each token: a reader is woken once and
    not for every token, and data that belongs together, such as the last token of an answer and its
    end, leaves as one packet.

    A connection that resumes reading after a pause waits for a turn: connections whose clients send
    as fast as they can share a part of each pass.
    """

    __slots__ = (
        "_gathered",
        "_n_bytes",
        "_on_close",
        "_reads",
        "_round",
        "_share",
        "_transport",
        "_waits_to_read",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        writes: WriteRound,
        reads: LoopShare,
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Wraps a transport. `on_close` is called when everything has been written to it and it
        begins to close."""
        super().__init__()
        self._transport = transport
        self._round = writes
        self._share = reads
        self._reads = True  # whether it reads, or will in its turn
        self._waits_to_read = False
        self._on_close = on_close
        self._gathered: list[bytes] = []
        self._n_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._gathered:
            self._round.add(self)
        self._gathered.append(bytes(data))
        self._n_bytes += len(data)
        if self._n_bytes > MAX_GATHERED_BYTES:
            self.flush()  # so that the transport notices that the client does not keep up

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def get_write_buffer_size(self) -> int:
        return self._n_bytes + self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport.is_closing():
            return
        self.flush()
        self._transport.close()
        if self._on_close is not None:
            self._on_close()

    def abort(self) -> None:
        self._gathered, self._n_bytes = [], 0
        self._transport.abort()

    def detach(self) -> None:
        """Lets go of `on_close`: the connection is lost."""
        self._on_close = None

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._reads = False
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._reads = True
        if not self._waits_to_read:
            self._waits_to_read = True
            self._share.take(self._read_on)

    def _read_on(self) -> None:
        self._waits_to_read = False
        if self._reads and not self._transport.is_closing():
            self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def flush(self) -> None:
        """Writes what was gathered."""
        data, self._gathered, self._n_bytes = b"".join(self._gathered), [], 0
        if data and not self._transport.is_closing():
            self._transport.write(data)
