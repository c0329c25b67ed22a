"""Runs the app for one request: uvicorn calls the app and writes the answer that the app sends.

uvicorn does not document `RequestResponseCycle` and `FlowControl`. Therefore
`requirements/frontend.in` pins the exact version of uvicorn, and `test_uvicorn_parts.py` checks
each part that is used. uvicorn's own server and protocol are not used, because they have no limits:
heads may have any size and any number of headers, and may arrive at any pace, and a client may send
any number of requests ahead. Also, if a request asks for an upgrade to another protocol, uvicorn
takes the request's body for data of that protocol.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from services.common import address
from services.frontend.http.transport.request_parser import RequestHead

log = logging.getLogger(__name__)


def ends_of(transport: asyncio.Transport) -> Scope:
    """Returns the part of the ASGI scope that is equal for all requests of a connection: the scheme
    and the addresses of both ends."""
    client = get_remote_addr(transport)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "root_path": "",
        "scheme": "https" if is_ssl(transport) else "http",
        "server": get_local_addr(transport),
        "client": None if client is None else tuple(address.of_socket(client)),
    }


def new_cycle(
    head: RequestHead,
    ends: Scope,
    *,
    transport: asyncio.Transport,
    flow: FlowControl,
    on_response: Callable[[], None],
) -> RequestResponseCycle:
    """Returns uvicorn's cycle, the object that runs the app for a request whose head has been
    received. `ends` is the result of `ends_of` for the connection. `on_response` is called when the
    answer is complete.

    Raises:
        HttpParserInvalidURLError: the URL of the request is not valid.
        UnicodeDecodeError: the path of the URL is not ASCII.
    """
    url = httptools.parse_url(head.url)
    path = url.path.decode("ascii")
    scope: Any = {
        **ends,
        "http_version": head.version,
        "method": head.method,
        "path": unquote(path) if "%" in path else path,
        "raw_path": url.path,
        "query_string": url.query or b"",
        "headers": head.headers,
    }
    return RequestResponseCycle(
        scope=scope,
        transport=transport,
        flow=flow,
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=_date_header(int(time.time())),
        message_event=asyncio.Event(),
        expect_100_continue=head.expects_continue,
        keep_alive=head.keeps_alive,
        on_response=on_response,
    )


@lru_cache(maxsize=1)
def _date_header(at_s: int) -> list[tuple[bytes, bytes]]:
    """Returns the header `date` for a time in seconds since 1970."""
    return [(b"date", formatdate(at_s, usegmt=True).encode())]


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wraps the app for a request in HTTP/1.0, where answers cannot be chunked. If an answer has no
    length, the connection is closed at the end of the answer."""

    async def unframed(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                cycle.chunked_encoding = None if b"content-length" in names else False
            elif cycle.chunked_encoding is False and cycle.expected_content_length == 0:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_on)

    return unframed
