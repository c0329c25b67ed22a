"""A streaming client for servers with the OpenAI API, which needs little processor time.

The client shares the machine with the measured server, so during a run it only stores the received
bytes with their times. Events are parsed after the run. Each request has its own connection. The
library httptools detects the end of an answer.
"""

import asyncio
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools

from benchmarks.serving.load import Answer, Reply
from benchmarks.workload import PlannedRequest

PATH = "/v1/completions"

EXACT_LENGTH: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
"""Request fields with which Orcinus, vLLM and other servers generate exactly the maximum number of
tokens and return token ids."""

DONE = b"[DONE]"


class OpenAIClient:
    """Streams completions from the server at `url`. If `url` has a path, that path replaces
    `/v1/completions`.

    `body` has fields that are added to every request; a field that is None is removed. `prompts`
    maps the token ids of prompts to texts, for servers that accept no token ids.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        body: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        prompts: Mapping[tuple[int, ...], str] | None = None,
    ) -> None:
        self._url = urlsplit(url)
        self._model = model
        self._body = {**EXACT_LENGTH, **(body or {})}
        self._api_key = api_key
        self._prompts = prompts

    def prepare(self, request: PlannedRequest) -> "Completion":
        """Returns the call for a request, with its HTTP message already made."""
        prompt = request.prompt_token_ids
        body = {
            "model": self._model,
            "prompt": prompt if self._prompts is None else self._prompts[prompt],
            "max_tokens": request.n_output,
            "min_tokens": request.n_output,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._body,
        }
        content = json.dumps({key: value for key, value in body.items() if value is not None})
        return Completion(self._url, _message(self._url, content.encode(), self._api_key))


class Completion:
    """A streaming completion call. It is sent once, and its events are parsed after the run."""

    def __init__(self, url: SplitResult, message: bytes) -> None:
        self._url = url
        self._message = message
        self._exchange: _Exchange | None = None

    async def send(self) -> None:
        """Sends the call and waits until the answer is complete.

        Raises:
            OSError: the server can't be reached, or closed the connection early.
        """
        loop = asyncio.get_running_loop()
        is_secure = self._url.scheme == "https"
        transport, self._exchange = await loop.create_connection(
            lambda: _Exchange(loop),
            self._url.hostname or "",
            self._url.port or (443 if is_secure else 80),
            ssl=ssl.create_default_context() if is_secure else None,
        )
        transport.write(self._message)
        try:
            await self._exchange.ended
        finally:
            transport.close()

    def read(self) -> Reply:
        """Parses the received part of the answer and returns it."""
        if self._exchange is None:
            return Reply((), error="never sent")
        return reply_of(self._exchange.status, self._exchange.pieces)


class _Exchange(asyncio.Protocol):
    """One HTTP request on its own connection. Stores the received parts of the answer with their
    times."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._now = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionResetError("the server hung up"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def reply_of(status: int, pieces: Sequence[tuple[float, bytes]]) -> Reply:
    """Parses a reply from the received parts and their times."""
    if status != 200:
        text = b"".join(piece for _, piece in pieces).decode(errors="replace")
        return Reply((), error=f"HTTP {status}: {text}" if status else "no answer")
    answers: list[Answer] = []
    usage: dict[str, int] = {}
    error = None
    for time_s, event in events_of(pieces):
        if event.get("error"):
            error = json.dumps(event["error"])
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            answers.append(Answer(time_s, _n_tokens(choice)))
    return Reply(
        tuple(answer for answer in answers if answer.n_tokens),
        n_prompt=usage.get("prompt_tokens"),
        n_output=usage.get("completion_tokens"),
        error=error,
    )


def events_of(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields the data of each server-sent event with the time of its last byte. The final `[DONE]`
    is left out."""
    rest = b""
    for time_s, piece in pieces:
        *blocks, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            data = b"\n".join(
                line.removeprefix(b"data:").strip()
                for line in block.split(b"\n")
                if line.startswith(b"data:")
            )
            if data and data != DONE:
                yield time_s, json.loads(data)


def _n_tokens(choice: Mapping[str, Any]) -> int:
    """Returns the number of tokens in a chunk: the length of `token_ids`, or 1 for a text if the
    server returns no token ids."""
    token_ids = choice.get("token_ids")
    return int(bool(choice.get("text"))) if token_ids is None else len(token_ids)


def _message(url: SplitResult, content: bytes, api_key: str | None) -> bytes:
    headers = {
        "host": url.netloc,
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
    }
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    path = url.path if url.path.strip("/") else PATH
    lines = [f"POST {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content
