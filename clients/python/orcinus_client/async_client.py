"""The client for an event loop of asyncio: `Client`, with waits that let other tasks run."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Self

import httpx

from orcinus_client import request
from orcinus_client.attempts import Attempts, Retry
from orcinus_client.errors import ClientError, ConnectionLost
from orcinus_client.request import CHAT, COMPLETIONS, Messages, Prompt
from orcinus_client.stream import Chunk, Stream


class AsyncClient:
    """Talks to one frontend, or to the next where one fails. Tasks may share it."""

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
        self._http = httpx.AsyncClient(
            headers=request.headers_of(api_key),
            timeout=request.timeout_of(connect_timeout_s, read_timeout_s),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def completion(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """Returns the completion of a prompt; options are fields of the HTTP API.

        Raises:
            ClientError: it is refused, or could not be had in all attempts.
        """
        return await self._call("POST", COMPLETIONS, {"prompt": prompt, **options})

    async def chat(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """Returns the next turn of a conversation; options and errors are as of `completion`."""
        return await self._call("POST", CHAT, {"messages": messages, **options})

    async def models(self) -> dict[str, Any]:
        """Returns the list of models; errors are as of `completion`."""
        return await self._call("GET", "/models", None)

    def stream_completion(
        self, prompt: Prompt, *, resume: bool = True, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of a completion; one that breaks goes on elsewhere if it may `resume`.

        Raises:
            ClientError: it is refused or has failed, or its rest could not be had in all attempts.
        """
        return self.stream(COMPLETIONS, {"prompt": prompt, **options}, resume=resume)

    def stream_chat(
        self, messages: Messages, *, resume: bool = True, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of the next turn, as `stream_completion` does."""
        return self.stream(CHAT, {"messages": messages, **options}, resume=resume)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, resume: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of a body that is posted to a path, as `stream_completion` does."""
        stream = Stream(body, resume=resume)
        attempts = Attempts(self._base_urls, self._retry)
        while not stream.is_done:
            try:
                async with aclosing(self._connection(attempts.base_url + path, stream)) as chunks:
                    async for chunk in chunks:
                        attempts.note_success()
                        yield chunk
            except ClientError as error:
                if not stream.can_go_on:
                    raise
                await asyncio.sleep(attempts.fail(error))

    async def _connection(self, url: str, stream: Stream) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks that come over one connection."""
        body, headers = stream.begin()
        headers |= request.trace_headers()
        try:
            async with self._http.stream("POST", url, json=body, headers=headers) as response:
                if not response.is_success:
                    await response.aread()
                    request.value_of(response)
                async for data in response.aiter_bytes():
                    for chunk in stream.take(data):
                        yield chunk
                    if stream.is_done:
                        return
        except httpx.TransportError as error:
            raise ConnectionLost(f"{url}: {error or type(error).__name__}") from error
        stream.end()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        attempts = Attempts(self._base_urls, self._retry)
        while True:
            try:
                return await self._attempt(method, attempts.base_url + path, body)
            except ClientError as error:
                await asyncio.sleep(attempts.fail(error))

    async def _attempt(
        self, method: str, url: str, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        try:
            response = await self._http.request(
                method, url, json=body, headers=request.trace_headers()
            )
        except httpx.TransportError as error:
            raise ConnectionLost(f"{url}: {error or type(error).__name__}") from error
        return request.value_of(response)
