"""An answer in JSON that is sent in parts, each as soon as it is written, so that a long answer is
never whole in memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.http.transport.event_stream import send_while_connected
from services.frontend.http.transport.media_types import JSON


class JsonParts(Response):
    """A response of JSON in parts, which ends early if the client disconnects.

    An error before the first part is raised, and so becomes an answer with its own status. A part
    is written once the client has read most of the parts before it.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.raw_headers = [(b"content-type", JSON.encode())]
        self.background = None
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_while_connected(scope, receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        has_started = False
        async with aclosing(self._parts) as parts:
            async for part in parts:
                if not has_started:
                    has_started = True
                    headers = self.raw_headers
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
