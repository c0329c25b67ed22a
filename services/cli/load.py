"""A small load generator: simulates a number of users, each of which sends one request after the
other.

A user sends the next request as soon as the previous answer is complete. Such a closed loop shows
how a server performs for a number of users, not how the server behaves when it is overloaded. If
the load runs on the server's machine, it takes some of the server's processor time.
"""

import asyncio
import json
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a request. All times are seconds on the event loop's clock."""

    sent: float
    first: float | None
    """Time of the first token; None if no token arrived."""
    last: float
    n_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token, or to its end if no token
        arrived."""
        return (self.last if self.first is None else self.first) - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds for each token after the first. None if there are fewer than two tokens."""
        if self.first is None or self.n_tokens < 2:
            return None
        return (self.last - self.first) / (self.n_tokens - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """The load on a server: requests with random prompts, all of the same length."""

    url: str
    model: str
    api_key: str | None
    vocabulary: Sequence[int]
    """Ids of the tokens from which prompts are made by choosing at random."""
    n_users: int
    n_requests: int
    n_prompt_tokens: int
    n_output_tokens: int
    seed: int = 0
    limit_s: float = 600.0
    """Timeout in seconds for a request. A request that is not complete by then counts as failed."""

    async def run(self) -> list[Answered]:
        """Sends all requests, and returns the result of each."""
        bodies = iter(self._bodies())
        users = [self._user(bodies) for _ in range(self.n_users)]
        return [each for answered in await asyncio.gather(*users) for each in answered]

    async def _user(self, bodies: Any) -> list[Answered]:
        return [await self._request(body) for body in bodies]

    async def _request(self, body: bytes) -> Answered:
        call = _StreamedAnswer()
        sent = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.limit_s):
                await self._exchange(call, body)
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            call.error = str(error) or type(error).__name__
        return call.answered(sent)

    async def _exchange(self, call: "_StreamedAnswer", body: bytes) -> None:
        parts = urlsplit(self.url)
        is_secure = parts.scheme == "https"
        reader, writer = await asyncio.open_connection(
            parts.hostname,
            parts.port or (443 if is_secure else 80),
            ssl=ssl.create_default_context() if is_secure else None,
        )
        try:
            writer.write(self._head(len(body)) + body)
            while not call.is_complete:
                data = await reader.read(65536)
                if not data:
                    raise ConnectionResetError("the server hung up")
                call.feed(data, asyncio.get_running_loop().time())
        finally:
            writer.close()

    def _head(self, length: int) -> bytes:
        parts = urlsplit(self.url)
        lines = [
            f"POST {parts.path.rstrip('/')}{PATH} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            *([] if self.api_key is None else [f"Authorization: Bearer {self.api_key}"]),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def _bodies(self) -> Sequence[bytes]:
        chance = random.Random(self.seed)
        return [
            json.dumps(
                {
                    "model": self.model,
                    "prompt": chance.choices(self.vocabulary, k=self.n_prompt_tokens),
                    "max_tokens": self.n_output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode()
            for _ in range(self.n_requests)
        ]


class _StreamedAnswer:
    """An answer that is being received. The server reports the answer's number of tokens in the
    last part."""

    def __init__(self) -> None:
        self.is_complete = False
        self.error = ""
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._n_tokens = 0
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Processes bytes of the HTTP answer that arrived at the time `now`."""
        self._now = now
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Processes a part of the answer's body. This method is called by httptools."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._take(json.loads(line.removeprefix(b"data: ")))

    def on_message_complete(self) -> None:
        """Records that the answer is complete. This method is called by httptools."""
        self.is_complete = True
        if self._parser.get_status_code() != 200:
            text = self._rest.decode(errors="replace")
            self.error = f"HTTP {self._parser.get_status_code()}: {text[:200]}"

    def answered(self, sent: float) -> Answered:
        """Returns the result of the request, which was sent at the time `sent`."""
        error = self.error or ("" if self._first is not None else "no token came")
        return Answered(sent, self._first, self._last or sent, self._n_tokens, error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        if usage := event.get("usage"):
            self._n_tokens = int(usage["completion_tokens"])
        if event.get("choices"):
            self._last = self._now
            if self._first is None:
                self._first = self._now
