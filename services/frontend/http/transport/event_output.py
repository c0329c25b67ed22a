"""The output of a stream of events: its headers, its data, and comments while there is no data.

Proxies and load balancers close a connection over which nothing comes for a minute, and a request
may wait longer than that: for a pipeline, in the queue, for a long prompt, or for text that is held
back.

A comment is one line, as the standard has it, without an empty line after it. Once it has seen an
event with an id, OpenAI's client takes an empty line for the end of an event without data, and
fails. The first comment does not come at once: the benchmarks of vLLM and SGLang fail at a comment
in any form, and their requests do not wait that long.
"""

import asyncio
from collections.abc import Sequence

from starlette.types import Send

from services.frontend.http.transport.chunk_writer import ChunkWriter

COMMENT = b": keep-alive\n"

HEADERS_S = 2.0
"""Seconds after which the headers are sent although the request has not been accepted yet. An error
before that is an answer with its own status."""


class EventOutput:
    """The output of one stream, in the task that sends it.

    Its only timer is not touched when data is written: when it expires, it looks when the last data
    was written, and is set again.
    """

    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        comment_s: float,
        chunks: ChunkWriter | None = None,
    ) -> None:
        """Prepares for output to an ASGI server. `chunks` is its writer of chunks, if it has one. A
        comment follows `comment_s` seconds of silence."""
        self.has_started = False
        """Whether the headers are sent, or being sent."""
        self._send = send
        self._chunks = chunks
        self._is_open = False  # the headers are out
        self._headers = headers
        self._comment_s = comment_s
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._filling: asyncio.Task[None] | None = None  # writes what the timer wants written
        self._timer = self._loop.call_later(min(HEADERS_S, comment_s), self._look)

    async def start(self) -> None:
        """Sends the headers, unless they are out."""
        if not self.has_started:
            self.has_started = True
            self._wrote_at = self._loop.time()
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(self._headers)}
            )
            self._is_open = True

    @property
    def chunks(self) -> ChunkWriter | None:
        """Writer of chunks of the server, if it has one, once the headers are sent. What is written
        to it follows what was written here before."""
        return self._chunks if self._is_open else None

    async def write(self, data: bytes) -> None:
        """Sends data, after the headers."""
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
        """Sends nothing more. A second call has no effect."""
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
        """Sends what is missing; waits while the client does not read."""
        if self.has_started:
            await self.write(COMMENT)
        else:
            await self.start()
        self._timer = self._loop.call_at(self._wrote_at + self._comment_s, self._look)
