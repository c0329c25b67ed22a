"""The client for threads."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx

from orcinus_client.attempts import Retry
from orcinus_client.calls import Frontends, Messages, Prompt, Query, StreamedCall
from orcinus_client.errors import ClientError
from orcinus_client.request import (
    answer_timeout,
    check_stream,
    connection_options,
    connection_to,
    stripped,
    trace_headers,
    value_of,
)
from orcinus_client.stream import Chunk


class Client:
    """Sends calls to one frontend, and to the next frontend if the first fails. Several threads may
    share a client."""

    def __init__(
        self,
        *base_urls: str,
        api_key: str | None = None,
        retry: Retry | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
        answer_timeout_s: float | None = 3600.0,
    ) -> None:
        """`base_urls` end in `/v1`. `read_timeout_s` limits the time between bytes of a stream, and
        `answer_timeout_s` the time of an answer that is not streamed."""
        self._frontends = Frontends(stripped(base_urls), retry or Retry())
        self._answer_timeout = answer_timeout(connect_timeout_s, answer_timeout_s)
        self._http = httpx.Client(
            **connection_options(
                api_key, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
            )
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
            ClientError: the request is refused, or all attempts failed.
        """
        return self._call(Query.completion(prompt, options))

    def chat(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """Returns the next turn of a conversation; options and errors are those of `completion`."""
        return self._call(Query.chat(messages, options))

    def models(self) -> dict[str, Any]:
        """Returns the list of models; errors are those of `completion`."""
        return self._call(Query.models())

    def stream_completion(
        self, prompt: Prompt, *, resume: bool = True, **options: Any
    ) -> Iterator[Chunk]:
        """Yields the chunks of a completion. With `resume`, a stream that breaks is resumed at
        another frontend.

        Raises:
            ClientError: the request is refused or has failed, or all attempts to resume failed.
        """
        return self._stream(Query.completion(prompt, options), resume=resume)

    def stream_chat(
        self, messages: Messages, *, resume: bool = True, **options: Any
    ) -> Iterator[Chunk]:
        """Yields the chunks of the next turn of a conversation, as `stream_completion` does."""
        return self._stream(Query.chat(messages, options), resume=resume)

    def stream(self, path: str, body: Mapping[str, Any], *, resume: bool = True) -> Iterator[Chunk]:
        """Posts a body to a path and yields the answer's chunks, as `stream_completion` does."""
        return self._stream(Query("POST", path, body), resume=resume)

    def _stream(self, query: Query, *, resume: bool) -> Iterator[Chunk]:
        call = StreamedCall(self._frontends, query, resume=resume)
        while not call.is_done:
            try:
                yield from self._connection(call)
            except ClientError as error:
                time.sleep(call.fail(error))

    def _connection(self, call: StreamedCall) -> Iterator[Chunk]:
        """Yields the chunks of one connection."""
        url, body, headers = call.begin()
        with (
            connection_to(url),
            self._http.stream("POST", url, json=body, headers=headers) as response,
        ):
            if not response.is_success:
                response.read()
                value_of(response)
            check_stream(response)
            for data in response.iter_bytes():
                yield from call.take(data)
                if call.is_done:
                    return
        call.end()

    def _call(self, query: Query) -> dict[str, Any]:
        attempts = self._frontends.attempts(is_computed=query.is_computed)
        while True:
            try:
                return self._attempt(query, attempts.frontend)
            except ClientError as error:
                time.sleep(attempts.fail(error))

    def _attempt(self, query: Query, base_url: str) -> dict[str, Any]:
        url = base_url + query.path
        timeout = self._answer_timeout if query.is_computed else self._http.timeout
        with connection_to(url, is_computed=query.is_computed):
            response = self._http.request(
                query.method, url, json=query.body, headers=trace_headers(), timeout=timeout
            )
        return value_of(response)
