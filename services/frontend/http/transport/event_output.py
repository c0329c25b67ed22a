"""The output of a stream of events: headers, data, and comments while there is no data.

Proxies and load balancers close a connection that is silent for a minute. A request may wait longer
than a minute: for a pipeline, in the queue, for a long prompt, or for text that is held back.

A comment is one line, as the standard says, without an empty line after it. OpenAI's client takes
such an empty line for the end of an event without data, and then fails if an earlier event had an
id. The first comment is not sent at once: the benchmarks of vLLM and SGLang fail at any comment,
and their requests do not wait long enough to get one.
"""

import asyncio
from collections.abc import Mapping, Sequence

from starlette.types import Send

from services.frontend.http.transport.chunk_writer import ChunkWriter

COMMENT = b": keep-alive\n"

HEADERS_S = 2.0
"""Seconds after which the headers are sent even if the request has not been accepted yet. If an
error occurs earlier, the answer has the status of the error."""


class EventOutput:
    """The output of one stream of events.

    One timer serves for the headers and the comments. When it expires, the headers or a comment are
    sent, unless data has been written meanwhile. In that case the timer is started again, counted
    from the time of the last data. Writing data does not touch the timer, because data is written
    often.
    """

    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        comment_s: float,
        chunks: ChunkWriter | None = None,
    ) -> None:
        """Prepares output to an ASGI server. `chunks` is the chunk writer of the server, or None. A
        comment is sent after `comment_s` seconds without data."""
        self.has_started = False
        """Whether the headers have been sent or are being sent."""
        self._send = send
        self._chunks = chunks
        self._is_open = False  # the headers have been sent
        self._headers = list(headers)
        self._comment_s = comment_s
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._filling: asyncio.Task[None] | None = None  # writes headers or a comment for the timer
        self._timer = self._loop.call_later(min(HEADERS_S, comment_s), self._look)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Adds headers. Headers that have been sent already are not changed."""
        self._headers += [(name.encode(), value.encode()) for name, value in headers.items()]

    async def start(self) -> None:
        """Sends the headers, unless the headers have been sent already."""
        if not self.has_started:
            self.has_started = True
            self._wrote_at = self._loop.time()
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
            self._is_open = True

    @property
    def chunks(self) -> ChunkWriter | None:
        """Chunk writer of the server. The value is None before the headers are sent, and if the
        server has no chunk writer. Data that the chunk writer sends follows all data that `write`
        has sent before."""
        return self._chunks if self._is_open else None

    async def write(self, data: bytes) -> None:
        """Sends data. If the headers have not been sent, sends the headers first."""
        if not self.has_started:
            await self.start()
        if self._is_open and self._chunks is not None and self._chunks.is_ready:
            self._chunks.write(data)
            return
        self._wrote_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the response."""
        self._timer.cancel()
        if self._filling is not None:
            await self._filling
            self._timer.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    def close(self) -> None:
        """Stops sending comments. A second call has no effect."""
        self._timer.cancel()
        if self._filling is not None:
            self._filling.cancel()

    def _look(self) -> None:
        if self._chunks is not None:
            self._wrote_at = max(self._wrote_at, self._chunks.wrote_at)
        due = self._wrote_at + (self._comment_s if self.has_started else HEADERS_S)
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._filling = self._loop.create_task(self._fill())

    async def _fill(self) -> None:
        """Sends a comment, or the headers if they have not been sent yet. Waits while the client
        does not read."""
        if self.has_started:
            await self.write(COMMENT)
        else:
            await self.start()
        self._timer = self._loop.call_at(self._wrote_at + self._comment_s, self._look)
