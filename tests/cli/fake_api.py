"""A frontend that answers chats with the events that a test gives."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.fake_http import serving_http

HOLD = "hold"
"""Stands in place of an event. The frontend then sends nothing more, until the test ends."""


@dataclass(slots=True)
class FakeApi:
    """A frontend. `answers` returns, for the body of a call, the events to send, or a status and an
    error message."""

    answers: Callable[[dict[str, Any]], Sequence[Any] | tuple[int, str]]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    is_holding: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @contextmanager
    def serving(self) -> Iterator["FakeApi"]:
        """Serves until the end of the block, and yields the frontend."""
        with serving_http(_Handler, released=self.released, api=self) as self.url:
            yield self


def delta(text: str, **others: str) -> dict[str, Any]:
    """Returns a chunk of a streamed chat."""
    return {"choices": [{"index": 0, "delta": {"content": text, **others}}]}


class _Handler(BaseHTTPRequestHandler):
    api: FakeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.api.keys.append(self.headers["Authorization"])
        self._json(200, {"data": [{"id": "fake"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.api.bodies.append(body)
        answer = self.api.answers(body)
        if isinstance(answer, tuple):
            self._json(answer[0], {"error": {"message": answer[1]}})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in answer:
            if event == HOLD:
                self.wfile.flush()
                self.api.is_holding.set()
                self.api.released.wait(60)
                self.close_connection = True
                return
            self._chunk(f"data: {json.dumps(event)}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _json(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _chunk(self, text: str) -> None:
        content = text.encode()
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
