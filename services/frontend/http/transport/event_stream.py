"""Answers that take long: watches the client's connection while the answer is made, and sends
streams of server-sent events.

When a client disconnects, the work for the client is cancelled at once, whatever the work is
waiting for. This module cancels work for no other reason.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common import errors
from services.frontend.http.transport.chunk_writer import ChunkWriter
from services.frontend.http.transport.event_output import EventOutput

Result = TypeVar("Result")


Event = bytes
"""Type of a server-sent event, as the bytes that are sent."""

LAST_EVENT_ID = "Last-Event-ID"
"""Header by which a client resumes a broken stream. Its value is the id of the last event that the
client has received."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""HTTP headers of a stream. They ask proxies to forward events at once."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work` and returns its result. If the client disconnects meanwhile, cancels `work`.
    The body of the request must have been read before.

    Raises:
        RequestCancelled: the client disconnected. The work was cancelled and has ended.
    """
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        return await _until(watching, work)
    finally:
        watching.cancel()


async def send_while_connected(
    scope: Scope, receive: Receive, sending: Coroutine[Any, Any, None]
) -> None:
    """Awaits the sending of an answer, and cancels it once the client has disconnected. The body of
    the request must have been read before."""
    chunks = ChunkWriter.of(scope)
    with suppress(errors.RequestCancelled):  # the client has disconnected
        if chunks is None:
            await while_connected(receive, sending)
        else:
            chunks.flow.resume_reading()  # paused by a long body; a lost client must be noticed
            await _until(chunks.gone, sending)


async def _until(gone: asyncio.Future[None], work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work as `while_connected` does. The future `gone` is done once the client has
    disconnected."""
    task = asyncio.current_task()
    assert task is not None
    has_gone = False

    def leave(gone: asyncio.Future[None]) -> None:
        nonlocal has_gone
        if not gone.cancelled():
            has_gone = True
            task.cancel()

    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_gone and not task.uncancel():
            raise errors.RequestCancelled("the client has gone away") from None
        raise
    finally:
        gone.remove_done_callback(leave)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, which ends early if the client disconnects.

    `write` starts the output when the request is accepted, and writes the events. An error before
    the output has started is raised, and so becomes an answer with its own status. A later error
    becomes the last event, which `explain` returns. After `comment_s` seconds without an event a
    comment is sent.
    """

    def __init__(
        self,
        write: Callable[[EventOutput], Awaitable[None]],
        *,
        explain: Callable[[errors.OrcinusError], Event],
        comment_s: float,
    ) -> None:
        self.status_code = 200
        self.raw_headers = list(HEADERS)
        self.background = None
        self._write = write
        self._explain = explain
        self._comment_s = comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = self._send_all(send, ChunkWriter.of(scope))
        await send_while_connected(scope, receive, sending)

    async def _send_all(self, send: Send, chunks: ChunkWriter | None) -> None:
        output = EventOutput(send, self.raw_headers, comment_s=self._comment_s, chunks=chunks)
        try:
            await self._write_all(output)
            await output.end()
        finally:
            output.close()

    async def _write_all(self, output: EventOutput) -> None:
        try:
            await self._write(output)
        except errors.OrcinusError as error:
            if not output.has_started:
                raise
            await output.write(self._explain(error))


def framed(data: bytes, *, event_id: bytes = b"", name: bytes = b"") -> Event:
    """Returns an event with one line of data. The event has the name `name` or the id `event_id`,
    if one is given. If both are given, the event has only the name."""
    if name:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    if event_id:
        return b"id: %b\ndata: %b\n\n" % (event_id, data)
    return b"data: %b\n\n" % data
