"""Writes chunks of a streamed answer straight to the transport.

A message of ASGI passes through the layers of the app, each a coroutine, which makes a third of the
cost of a token. A connection offers a stream this way around the layers, for use once its headers
are sent. The end of the answer passes through the layers. The writer also tells when the connection
is lost; a message of ASGI would tell that only to a task that waits for it.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

EXTENSION, WRITER = "orcinus.chunks", "writer"
"""Name of the extension in ASGI's scope, and of the writer in it."""


class ChunkWriter:
    """Writes chunks of one answer to a connection."""

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
        """Whether the client keeps up, so that more may be written."""
        return not self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Writes a chunk, which must not be empty. On a closed connection nothing is written."""
        self.wrote_at = self._time()
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def note_loss(self) -> None:
        """Notes that the connection is lost."""
        if not self.gone.done():
            self.gone.set_result(None)

    def extension(self) -> dict[str, dict[object, object]]:
        """Returns the extensions of ASGI's scope that offer this writer to the app."""
        return {EXTENSION: {WRITER: self}}

    @staticmethod
    def of(scope: Scope) -> "ChunkWriter | None":
        """Returns the writer that the server offers for a request; None if it offers none."""
        extension = scope.get("extensions", {}).get(EXTENSION, {})
        writer = extension.get(WRITER)
        return writer if isinstance(writer, ChunkWriter) else None
