"""The calls of a client, without connections: which request is made next, where, and when.

A client makes the requests that a call names, passes the received bytes to the call, and waits as
long as the call says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orcinus_client.attempts import Attempts, Retry
from orcinus_client.errors import ClientError
from orcinus_client.request import trace_headers
from orcinus_client.stream import Chunk, Stream

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Frontends:
    """The base URLs of a client's frontends, and the limits of retries."""

    base_urls: Sequence[str]
    retry: Retry

    def attempts(self, *, is_computed: bool) -> Attempts[str]:
        """Returns the attempts of a new call; for `is_computed` see `Attempts`."""
        return Attempts(self.base_urls, self.retry, is_computed=is_computed)


@dataclass(frozen=True, slots=True)
class Query:
    """A method and a path of the API, with the body for it."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether a model computes the answer, so that each attempt computes it again."""
        return self.body is not None

    @classmethod
    def completion(cls, prompt: Prompt, options: Mapping[str, Any]) -> "Query":
        """Returns the query for a completion."""
        return cls("POST", "/completions", {"prompt": prompt, **options})

    @classmethod
    def chat(cls, messages: Messages, options: Mapping[str, Any]) -> "Query":
        """Returns the query for the next turn of a conversation."""
        return cls("POST", "/chat/completions", {"messages": messages, **options})

    @classmethod
    def models(cls) -> "Query":
        """Returns the query for the list of models."""
        return cls("GET", "/models")


class StreamedCall:
    """A call whose answer comes as a stream, over one connection after another."""

    def __init__(self, frontends: Frontends, query: Query, *, resume: bool) -> None:
        self._attempts = frontends.attempts(is_computed=not resume)
        self._path = query.path
        self._stream = Stream(query.body or {}, resume=resume)

    @property
    def is_done(self) -> bool:
        """Whether the stream is complete."""
        return self._stream.is_done

    def begin(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Begins another connection; returns the URL, the body and the headers of its request."""
        body, headers = self._stream.begin()
        return self._attempts.frontend + self._path, body, headers | trace_headers()

    def take(self, data: bytes) -> Iterator[Chunk]:
        """Takes further bytes of the answer, and yields the chunks that are complete with them.

        Raises:
            ApiError: a chunk is an error.
            UnexpectedAnswer: an event is not a chunk.
        """
        for chunk in self._stream.take(data):
            self._attempts.note_success()
            yield chunk

    def end(self) -> None:
        """Notes that the connection has ended; raises ConnectionLost if the stream is not
        complete."""
        self._stream.end()

    def fail(self, error: ClientError) -> float:
        """Notes that the connection has failed; returns the seconds to wait before the next
        connection.

        Raises:
            ClientError: `error`, if another connection cannot continue the stream.
        """
        if not self._stream.can_go_on:
            if self._stream.lacks_ids:
                error.add_note("its events had no ids: something between takes them out")
            raise error
        return self._attempts.fail(error)
