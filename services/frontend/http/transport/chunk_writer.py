"""Chunks of a streamed answer, written straight to the transport.

A message of ASGI goes through the layers of the app, each a coroutine, which is a third of what a
token costs. A connection offers a stream this way around them, for use once its headers are out.
The end of the answer goes through them. It also says when the connection is lost, which a message
would tell only to a task that waits for it.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

EXTENSION, WRITER = "orcinus.chunks", "writer"
"""Names of the extension of ASGI's scope, and of what is in it."""


class ChunkWriter:
    """Writes chunks of one answer to a connection."""

    __slots__ = ("_time", "_write", "flow", "gone", "wrote_at")

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        flow: FlowControl,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.flow = flow
        """The connection's flow control."""
        self.gone: asyncio.Future[None] = loop.create_future()
        """Done once the connection is lost."""
        self._write = transport.write
        self._time = loop.time
        self.wrote_at = 0.0
        """Time of the last chunk, by the event loop's clock."""

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up, so that more may be written."""
        return not self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Writes a chunk, which must not be empty; on a connection that is closed, nothing."""
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
        """Returns the writer that the server offers for a request, if it does."""
        extension = scope.get("extensions", {}).get(EXTENSION, {})
        writer = extension.get(WRITER)
        return writer if isinstance(writer, ChunkWriter) else None
