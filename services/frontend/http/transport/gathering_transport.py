"""A transport that writes at most once in each pass of the event loop. It also limits how often the
data of a client that sends fast is read."""

import asyncio
from collections.abc import Callable
from typing import Any

from services.frontend.loop_share import LoopShare

MAX_GATHERED_BYTES = 2**16
"""Number of gathered bytes above which a transport writes at once, and not only at the end of the
event loop's pass."""


class WriteRound:
    """Writes the data of connections at the end of a pass of the event loop: knows which
    connections have gathered data in this pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._written: list[GatheringTransport] = []

    def add(self, transport: "GatheringTransport") -> None:
        """Adds a connection. Its gathered data is written at the end of this pass of the event
        loop."""
        if not self._written:
            self._loop.call_soon(self._end)
        self._written.append(transport)

    def _end(self) -> None:
        written, self._written = iter(self._written), []
        try:
            for transport in written:
                transport.flush()
        finally:
            for transport in written:  # transports after one that raised an error
                self.add(transport)


class GatheringTransport(asyncio.Transport):
    """A transport that gathers the data written during a pass of the event loop, and writes the
    data once at the end of the pass.

    An iteration of the model brings a token for each of many clients in one pass. The system calls
    for writing then follow each other at the end of the pass, instead of alternating with the work
    for each token. A client process with many connections is woken once instead of for each token.
    Data that belongs together, such as the last token of an answer and the end of the answer,
    leaves as one packet.

    A connection that resumes reading after a pause waits until `LoopShares.reads` allows it.
    Clients that send without a pause can therefore take only a limited part of each pass.
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
        """Wraps a transport. `on_close` is called when the transport begins to close, after all
        gathered data has been written to it."""
        super().__init__()
        self._transport = transport
        self._round = writes
        self._share = reads
        self._reads = True  # whether the transport reads, or will at its turn
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
            self.flush()  # lets the transport notice a client that reads too slowly

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
        """Deletes the reference to `on_close`. Called when the connection is lost."""
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
        """Writes the gathered data to the wrapped transport."""
        data, self._gathered, self._n_bytes = b"".join(self._gathered), [], 0
        if data and not self._transport.is_closing():
            self._transport.write(data)
