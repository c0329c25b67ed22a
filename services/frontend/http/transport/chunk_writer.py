"""Writes chunks of a streamed answer straight to the transport.

An ASGI message passes through the layers of the app, each of which is a coroutine. These coroutines
make a third of the cost of a token. A connection therefore offers a `ChunkWriter`. Once the headers
are sent, a stream writes its chunks with this writer, past the layers. The end of the answer passes
through the layers again. The writer also has a future that is done once the connection is lost.
With ASGI, a task would have to wait for the message about the loss.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

EXTENSION, WRITER = "orcinus.chunks", "writer"
"""`EXTENSION`: name of the extension in the ASGI scope. `WRITER`: key of the writer in the
extension."""


class ChunkWriter:
    """Writes the chunks of one answer to a connection."""

    __slots__ = ("_time", "_write", "flow", "gone", "wrote_at")

    def __init__(
        self, transport: asyncio.WriteTransport, flow: FlowControl, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.flow = flow
        """Flow control of the connection."""
        self.gone: asyncio.Future[None] = loop.create_future()
        """Future that is done once the connection is lost."""
        self._write = transport.write
        self._time = loop.time
        self.wrote_at = 0.0
        """Time of the last chunk, by the clock of the event loop."""

    @property
    def is_ready(self) -> bool:
        """Whether the stream may write more, because the client reads fast enough."""
        return not self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Writes a chunk, which must not be empty. If the connection is closed, nothing is
        written."""
        self.wrote_at = self._time()
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def note_loss(self) -> None:
        """Notes that the connection is lost, by completing the future `gone`."""
        if not self.gone.done():
            self.gone.set_result(None)

    def extension(self) -> dict[str, dict[object, object]]:
        """Returns the extension of ASGI's scope by which the app finds this writer."""
        return {EXTENSION: {WRITER: self}}

    @staticmethod
    def of(scope: Scope) -> "ChunkWriter | None":
        """Returns the writer that the server offers for a request. Returns None if the server
        offers no writer."""
        extension = scope.get("extensions", {}).get(EXTENSION, {})
        writer = extension.get(WRITER)
        return writer if isinstance(writer, ChunkWriter) else None
