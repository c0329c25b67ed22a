"""A client of a frontend's HTTP API, for commands on a terminal. It reads JSON and server-sent
events.

The client blocks and needs only the standard library. Each call makes a new connection.
"""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from services.common.errors import shortened

MAX_ANSWER_BYTES = 1 << 22
"""Maximum number of bytes of an answer, or of one event."""
DONE = "[DONE]"


class ApiError(Exception):
    """A call of the HTTP API failed. The message gives the reason. `status` is the HTTP status, or
    0 if there was no answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class HttpApi:
    """Calls the HTTP API at a URL."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        """`timeout_s` limits the time for making a connection, and for each wait for bytes.

        Raises:
            ValueError: the URL is neither http nor https.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{shortened(url)!r} is no URL like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """Returns the JSON answer to a GET of `path`. Raises ApiError if the call fails."""
        with self._called("GET", path, None) as response:
            return _json(response.read(MAX_ANSWER_BYTES))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Posts `body` as JSON to `path` and returns the JSON answer. Raises ApiError if the call
        fails."""
        with self._called("POST", path, body) as response:
            return _json(response.read(MAX_ANSWER_BYTES))

    @contextmanager
    def events(
        self, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Makes a call for a `with` block, and yields an iterator over the call's events, which are
        objects. The call is a POST if there is a body, otherwise a GET.

        The call is ended when the `with` block ends. ApiError may be raised at the start and while
        events are read.
        """
        with self._called("GET" if body is None else "POST", path, body) as response:
            yield self._events(response)

    @contextmanager
    def _called(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        content = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        with closing(self._connection()) as connection, self._explained():
            connection.request(method, self._path + path, body=content, headers=headers)
            # Closed on its own: it has the connection where the server says that it is its last.
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    raise _refusal(response)
                yield response

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ApiError(f"{self.url} has not answered for {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ApiError(f"{self.url} cannot be reached: {why}") from error

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        with self._explained():
            while line := response.readline(MAX_ANSWER_BYTES):
                name, _, value = line.decode(errors="replace").rstrip("\r\n").partition(":")
                if name != "data":
                    continue  # a comment that keeps the connection, or an id
                value = value.removeprefix(" ")
                if value == DONE:
                    return
                event = _json(value.encode())
                if isinstance(event, dict):
                    yield event


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the answer is no JSON: {shortened(repr(content))}") from error


def _refusal(response: http.client.HTTPResponse) -> ApiError:
    """Returns an ApiError with the server's explanation of a failed call, or with the HTTP status
    if there is no explanation."""
    content = response.read(MAX_ANSWER_BYTES)
    message = ""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(error := answer.get("error"), dict):
        message = str(error.get("message", ""))
    return ApiError(
        message or f"HTTP status {response.status} {response.reason}", status=response.status
    )
