"""The client for threads."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx

from orcinus_client import request
from orcinus_client.attempts import Attempts, Retry
from orcinus_client.errors import ClientError, ConnectionLost
from orcinus_client.request import CHAT, COMPLETIONS, Messages, Prompt
from orcinus_client.stream import Chunk, Stream


class Client:
    """Talks to one frontend, or to the next where one fails. Threads may share it."""

    def __init__(
        self,
        *base_urls: str,
        api_key: str | None = None,
        retry: Retry | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
    ) -> None:
        """`base_urls` end in `/v1`; `read_timeout_s` is for the time without a byte."""
        self._base_urls = request.stripped(base_urls)
        self._retry = retry or Retry()
        self._http = httpx.Client(
            headers=request.headers_of(api_key),
            timeout=request.timeout_of(connect_timeout_s, read_timeout_s),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def completion(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """Returns the completion of a prompt; options are fields of the HTTP API.

        Raises:
            ClientError: it is refused, or could not be had in all attempts.
        """
        return self._call("POST", COMPLETIONS, {"prompt": prompt, **options})

    def chat(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """Returns the next turn of a conversation; options and errors are as of `completion`."""
        return self._call("POST", CHAT, {"messages": messages, **options})

    def models(self) -> dict[str, Any]:
        """Returns the list of models; errors are as of `completion`."""
        return self._call("GET", "/models", None)

    def stream_completion(
        self, prompt: Prompt, *, resume: bool = True, **options: Any
    ) -> Iterator[Chunk]:
        """Yields the chunks of a completion; one that breaks goes on elsewhere if it may `resume`.

        Raises:
            ClientError: it is refused or has failed, or its rest could not be had in all attempts.
        """
        return self.stream(COMPLETIONS, {"prompt": prompt, **options}, resume=resume)

    def stream_chat(
        self, messages: Messages, *, resume: bool = True, **options: Any
    ) -> Iterator[Chunk]:
        """Yields the chunks of the next turn, as `stream_completion` does."""
        return self.stream(CHAT, {"messages": messages, **options}, resume=resume)

    def stream(self, path: str, body: Mapping[str, Any], *, resume: bool = True) -> Iterator[Chunk]:
        """Yields the chunks of a body that is posted to a path, as `stream_completion` does."""
        stream = Stream(body, resume=resume)
        attempts = Attempts(self._base_urls, self._retry)
        while not stream.is_done:
            try:
                for chunk in self._connection(attempts.base_url + path, stream):
                    attempts.note_success()
                    yield chunk
            except ClientError as error:
                if not stream.can_go_on:
                    raise
                time.sleep(attempts.fail(error))

    def _connection(self, url: str, stream: Stream) -> Iterator[Chunk]:
        """Yields the chunks that come over one connection."""
        body, headers = stream.begin()
        headers |= request.trace_headers()
        try:
            with self._http.stream("POST", url, json=body, headers=headers) as response:
                if not response.is_success:
                    response.read()
                    request.value_of(response)
                for data in response.iter_bytes():
                    yield from stream.take(data)
                    if stream.is_done:
                        return
        except httpx.TransportError as error:
            raise ConnectionLost(f"{url}: {error or type(error).__name__}") from error
        stream.end()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        attempts = Attempts(self._base_urls, self._retry)
        while True:
            try:
                return self._attempt(method, attempts.base_url + path, body)
            except ClientError as error:
                time.sleep(attempts.fail(error))

    def _attempt(self, method: str, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            response = self._http.request(method, url, json=body, headers=request.trace_headers())
        except httpx.TransportError as error:
            raise ConnectionLost(f"{url}: {error or type(error).__name__}") from error
        return request.value_of(response)
