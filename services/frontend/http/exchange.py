"""HTTP around a long answer: a bounded body, a watch on the client's connection, server-sent
events.

A client that goes away ends the work for it at once, wherever the work is; nothing else does the
cancelling.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common import errors
from services.frontend.http.chunk_writer import ChunkWriter
from services.frontend.http.event_output import EventOutput
from services.frontend.http.json_structure import StructureCount
from services.frontend.http.request_headers import headers_of
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusal, Refusals

Result = TypeVar("Result")


Event = bytes
"""A server-sent event as it is written."""

END = b"data: [DONE]\n\n"

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""Headers of a stream; they ask proxies to pass events on as they come."""


NEARLY_JSON = frozenset(
    {
        "",
        "*/*",
        "application/octet-stream",
        "application/x-www-form-urlencoded",
        "text/javascript",
        "text/plain",
    }
)
"""Types that bodies of JSON are sent as; the empty one is none."""

SMALL_BODY_BYTES = 64 * 2**10
"""Bytes of a body that finds room while large ones take all that they may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The limits of bodies; `FrontendSettings` explains them."""

    max_bytes: int
    limit_s: float
    budget: MemoryBudget
    refusals: Refusals

    def check_size(self, n_bytes: int) -> None:
        """Raises TooLarge if no body may be so large."""
        if n_bytes > self.max_bytes:
            self.refusals[Refusal.BODY_TOO_LARGE] += 1
            raise errors.TooLarge("body", f"must not be larger than {self.max_bytes} bytes")

    def check_room(self, n_bytes: int) -> None:
        """Raises PoolFull if so large a body would find no room now, before it is sent."""
        if self.budget.n_bytes and not self.budget.has_room(n_bytes + self.reserve(n_bytes)):
            raise self.budget.refuse()

    def reserve(self, n_bytes: int) -> int:
        """Returns the part of the budget that a body of that size must leave to small ones."""
        return 0 if n_bytes <= SMALL_BODY_BYTES else self.budget.max_bytes // 4


def check_media(headers: Mapping[str, str]) -> None:
    """Raises Unsupported if the headers say that the body is compressed, or that it cannot be JSON.

    A type that JSON is often sent as by mistake is taken: what curl says of any data, or a text's.
    """
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise errors.Unsupported("content-encoding", "a body must come as it is")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type.endswith(("/json", "+json")) or media_type in NEARLY_JSON:
        return
    raise errors.Unsupported("content-type", "must be application/json")


async def read_body(request: Request, limits: BodyLimits, share: Share) -> bytes:
    """Returns the body. The share of the budget grows as it arrives; a quarter of the budget is
    left to small bodies, so that these get in while slow uploads of large ones take the rest.

    Raises:
        Unsupported: it says that it is compressed, or no JSON.
        TooLarge: it is larger than a body may be, or says that it will be, or has too much
        structure.
        TimedOut: it did not come in time.
        PoolFull: requests take all the memory that they may.
    """
    headers = headers_of(request)
    check_media(headers)
    declared = headers.get("content-length", "0")
    n_declared = int(declared) if declared.isdecimal() else 0
    limits.check_size(n_declared)
    limits.check_room(n_declared)
    body, structure = bytearray(), StructureCount(limits.refusals)
    try:
        async with asyncio.timeout(limits.limit_s):
            async for chunk in request.stream():
                n_bytes = len(body) + len(chunk)
                limits.check_size(n_bytes)
                share.grow(len(chunk), leaving=limits.reserve(n_bytes))
                structure.add(chunk)
                body += chunk
    except TimeoutError:
        limits.refusals[Refusal.BODY_TIMEOUT] += 1
        raise errors.TimedOut(f"the body did not come in {limits.limit_s:g} s") from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work and returns its result, unless the client goes away meanwhile; its body must
    have been read.

    Raises:
        RequestCancelled: the client went away; the work has been cancelled and has ended.
    """
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        return await _until(watching, work)
    finally:
        watching.cancel()


async def _until(gone: asyncio.Future[None], work: Coroutine[Any, Any, Result]) -> Result:
    """Does what `while_connected` does; the future is done when the client has gone."""
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
    """A response of server-sent events, for as long as the client listens.

    `write` writes its events to the output, which it starts when the request is accepted. An error
    before that is raised, and so becomes an answer with its own status; a later one becomes the
    last event, which `explain` writes down. After `comment_s` seconds without an event comes a
    comment. `end` follows the events of a stream that ends well.
    """

    def __init__(
        self,
        write: Callable[[EventOutput], Awaitable[None]],
        *,
        explain: Callable[[errors.OrcinusError], Event],
        comment_s: float,
        end: bytes = END,
    ) -> None:
        self.status_code = 200
        self.raw_headers = list(HEADERS)
        self.background = None
        self._write = write
        self._explain = explain
        self._comment_s = comment_s
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks = ChunkWriter.of(scope)
        sending = self._send_all(send, chunks)
        with suppress(errors.RequestCancelled):  # nobody is there to be told
            if chunks is None:
                await while_connected(receive, sending)
            else:
                chunks.flow.resume_reading()  # a long body may have paused it, and an end is read
                await _until(chunks.gone, sending)

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
            if self._end:
                await output.write(self._end)
        except errors.OrcinusError as error:
            if not output.has_started:
                raise
            await output.write(self._explain(error))


def framed(data: bytes, *, event_id: bytes = b"", name: bytes = b"") -> Event:
    """Returns the event with some data, one line, and with an id or a name if it has one."""
    if name:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    if event_id:
        return b"id: %b\ndata: %b\n\n" % (event_id, data)
    return b"data: %b\n\n" % data
