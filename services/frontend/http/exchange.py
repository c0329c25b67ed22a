"""HTTP around a long answer: a bounded body, a watch on the client's connection, server-sent
events.

A client that goes away ends the work for it at once, wherever the work is; nothing else does the
cancelling.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.common import errors

Result = TypeVar("Result")


class Event(NamedTuple):
    """A server-sent event: its data, one line, and its id if it has one."""

    data: bytes
    event_id: bytes = b""


END = b"data: [DONE]\n\n"

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""Headers of a stream; they ask proxies to pass events on as they come."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body; what exceeds the limit is not kept.

    Raises:
        InvalidRequest: it is too large, or says that it will be.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> errors.InvalidRequest:
    return errors.InvalidRequest("body", f"must not be larger than {max_bytes} bytes")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work and returns its result, unless the client goes away meanwhile; its body must
    have been read.

    Raises:
        RequestCancelled: the client went away; the work has been cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if working.cancelled():
        raise errors.RequestCancelled("the client has gone away")
    return working.result()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, for as long as the client listens.

    An error before the first event is raised, and so becomes an answer with its own status; a
    later one becomes the last event. `explain` writes it down.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event],
        *,
        explain: Callable[[errors.OrcinusError], Event],
    ) -> None:
        self.status_code = 200
        self.raw_headers = list(HEADERS)
        self.background = None
        self._events = events
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(errors.RequestCancelled):  # nobody is there to be told
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, None)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if first is not None:
                await _send_data(send, _framed(first))
            try:
                async for event in events:
                    await _send_data(send, _framed(event))
                await _send_data(send, END)
            except errors.OrcinusError as error:
                await _send_data(send, _framed(self._explain(error)))
            await send({"type": "http.response.body", "body": b""})


async def _send_data(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _framed(event: Event) -> bytes:
    data, event_id = event
    if event_id:
        return b"id: %b\ndata: %b\n\n" % (event_id, data)
    return b"data: %b\n\n" % data
