"""The state of a stream that may come over several connections; the module makes no connections.

A stream that shows tokens can be resumed at any frontend. For that, the seed from the first chunk,
the tokens of the answers and the id of the last event are kept. After a break the request is posted
again together with these, and the new stream begins after the last event.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from orcinus_client.errors import ConnectionLost, UnexpectedAnswer, error_in_stream

Chunk = dict[str, Any]

END = "[DONE]"


class EventReader:
    """Reads server-sent events from bytes. An event is complete with the empty line after it.

    Lines end only at line feeds, since a text may contain the other characters at which Python
    splits lines.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._id = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[tuple[str, str]]:
        """Yields the id and the data of each event that is complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = _text_of(line.rstrip(b"\r")).partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                self._id = value
            elif name == "data":
                self._data.append(value)
            elif not name and not value and self._data:  # an empty line; a comment has a value
                yield self._id, "\n".join(self._data)
                self._data = []


class Stream:
    """The received part of a stream, as far as it is needed to resume the stream."""

    def __init__(self, body: Mapping[str, Any], *, resume: bool) -> None:
        self._body = {**body, "stream": True}
        if resume:
            self._body["return_token_ids"] = True
        self._resume = resume
        self._reader = EventReader()
        self._has_begun = False
        self._event_id = ""
        self._seed = 0
        self._token_ids: list[list[int]] = []
        self.is_done = False

    @property
    def can_go_on(self) -> bool:
        """Whether another connection can continue the stream."""
        return not self._has_begun or (self._resume and bool(self._event_id))

    @property
    def lacks_ids(self) -> bool:
        """Whether the stream cannot be resumed because its events had no ids."""
        return self._resume and not self.can_go_on

    def begin(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Begins another connection; returns the body and the headers of its request."""
        self._reader = EventReader()
        if not self._event_id:
            return self._body, {}
        resumption = {"seed": self._seed, "token_ids": self._token_ids}
        return {**self._body, "resumption": resumption}, {"Last-Event-ID": self._event_id}

    def take(self, data: bytes) -> Iterator[Chunk]:
        """Takes further bytes of the answer, and yields the chunks that are complete with them.

        Raises:
            ApiError: a chunk is an error.
            UnexpectedAnswer: an event is not a chunk.
        """
        for event_id, text in self._reader.feed(data):
            if text == END:
                self.is_done = True
                return
            chunk = _chunk_of(text)
            if "error" in chunk:
                raise error_in_stream(chunk["error"])
            try:
                self._note(event_id, chunk)
            except (KeyError, TypeError) as error:
                raise UnexpectedAnswer(f"a chunk without what it takes: {text[:200]}") from error
            yield chunk

    def end(self) -> None:
        """Notes that the connection has ended.

        Raises:
            ConnectionLost: the stream is not complete.
        """
        if not self.is_done:
            raise ConnectionLost("the server hung up before the end of the stream")

    def _note(self, event_id: str, chunk: Chunk) -> None:
        self._has_begun = True
        if not self._resume:
            return
        self._event_id = event_id
        self._seed = chunk.get("seed", self._seed)
        for choice in chunk["choices"]:
            while len(self._token_ids) <= choice["index"]:
                self._token_ids.append([])
            self._token_ids[choice["index"]] += choice["token_ids"]


def _text_of(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise UnexpectedAnswer(f"no text in a stream: {line[:200]!r}") from error


def _chunk_of(text: str) -> Chunk:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UnexpectedAnswer(f"no JSON object in a stream: {text[:200]}")
    return value
