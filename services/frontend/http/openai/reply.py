"""Answers in the shapes of the OpenAI API: whole, and as chunks of a stream.

`Shape` has what both kinds of generation share; `completion_shape.py` and `chat_shape.py` have the
rest.

The first chunk of a stream has the request's seed. A stream that shows tokens can be resumed: its
events have ids, and after a resumption come the tokens, texts and ends that the client lacks. Other
streams have no ids, since popular clients of streams, vLLM's benchmark among them, know no lines
but those of data.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pydantic_core

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai import logprobs as logprobs_shape
from services.frontend.http.openai.event_id import AnswerPosition, EventIds, StreamPosition
from services.frontend.http.transport.event_stream import Event, framed
from services.frontend.request.pipeline import Pipeline
from services.frontend.request.request_id import created_at

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
"""Last event of a stream that ends well."""

SHORT_CHARACTERS, MAX_CACHED = 32, 2**13
"""Characters of the texts whose JSON is kept, and their number: a megabyte of them."""


def to_json(value: Json | str) -> bytes:
    """Returns JSON in ASCII: some clients of streams take U+2028 or U+0085 for the end of a
    line."""
    return pydantic_core.to_json(value, ensure_ascii=True, inf_nan_mode="null")


def text_json(text: str) -> bytes:
    """Returns a text in JSON; those of single tokens, which come again and again, are kept."""
    return _short_json(text) if len(text) <= SHORT_CHARACTERS else to_json(text)


_short_json = lru_cache(MAX_CACHED)(to_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFields:
    """The fields that a client may have in its answers besides those that all have."""

    includes_usage: bool = False
    """Whether a stream has the usage at its end,"""
    counts_usage: bool = False
    """and each of its chunks the usage so far."""
    n_prompt_logprobs: int | None = None
    """Alternatives in the field `prompt_logprobs` of an answer that is whole; None leaves the field
    out."""


NO_OTHERS = ShownFields()


class Shape(ABC):
    """The shape of the answers of one kind of generation, from a position in its stream on."""

    __slots__ = (
        "_chunk_end",
        "_chunk_start",
        "_counts_usage",
        "_generation",
        "_has_ids",
        "_has_text_only",
        "_ids",
        "_n_prompt_logprobs",
        "_seed",
        "_text_end",
        "_text_starts",
    )

    id_prefix: str
    answer_object: str
    chunk_object: str
    text_start: bytes
    """The JSON of a choice that has nothing but text, up to the text; `%d` is its index."""
    text_end: bytes
    """The rest of that JSON, after the text."""

    def __init__(
        self,
        generation: Generation,
        position: StreamPosition | None = None,
        *,
        shown: ShownFields = NO_OTHERS,
    ) -> None:
        self._generation = generation
        self._counts_usage = shown.counts_usage
        self._n_prompt_logprobs = shown.n_prompt_logprobs
        nowhere = (AnswerPosition(),) * generation.n_answers
        self._ids = EventIds(
            generation.request_id, nowhere if position is None else position.answers
        )
        self._has_ids = generation.options.return_token_ids
        # Most of a chunk is the same in all chunks of a stream, so it is written once.
        self._chunk_start = to_json(self._envelope(self.chunk_object))[:-1] + b',"choices":'
        self._chunk_end = b',"usage":null}' if shown.includes_usage else b"}"
        self._text_starts: dict[int, bytes] = {}  # of chunks that have nothing but text, by index
        self._text_end = self.text_end + b"]" + self._chunk_end + b"\n\n"
        wants_more = generation.options.n_logprobs is not None or shown.counts_usage
        self._has_text_only = not wants_more and not self._has_ids
        self._seed = b',"seed":%d' % generation.options.sampling.seed if position is None else b""

    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Yields the complete answer in JSON, made of whole pieces, a choice at a time."""
        yield to_json(self._envelope(self.answer_object))[:-1] + b',"choices":['
        for place, piece in enumerate(pieces):
            yield (b"," if place else b"") + to_json(self._whole_choice(piece))
        yield b"]," + to_json({"usage": self._usage(), **self._end(pieces)})[1:]

    def events(self, piece: Piece) -> Iterable[Event]:
        """Returns the events for a new piece of an answer, a chunk in JSON each."""
        if piece.finish_reason is None:
            event = self.text_event(piece.index, piece.text)
            if event is not None:
                return (event,)
        return self._events(piece)

    def text_event(self, index: int, text: str) -> Event | None:
        """Returns the event for new text of an answer; None if the stream has other chunks, or has
        none of the answer yet."""
        start = self._text_starts.get(index)
        return None if start is None else b"%b%b%b" % (start, text_json(text), self._text_end)

    def usage_event(self) -> Event:
        """Returns the last event of a stream, for clients that want to know the usage."""
        chunk = b'%b[],"usage":%b}' % (self._chunk_start, to_json(self._usage()))
        return framed(chunk, event_id=self._ids.usage() if self._has_ids else b"")

    def _is_text(self, index: int) -> bool:
        """Returns whether all that is left of an answer, but its end, is text as it comes."""
        return self._ids.has_begun(index)

    def _events(self, piece: Piece) -> Iterator[Event]:
        is_first = not self._ids.has_begun(piece.index)
        for part, choice in self._chunk_choices(piece, is_first=is_first):
            self._ids.advance(
                part.index, len(part.token_ids), is_finished=part.finish_reason is not None
            )
            chunk = b"%b[%b]%b%b" % (
                self._chunk_start,
                to_json(choice),
                self._seed,
                b',"usage":%b}' % to_json(self._usage()) if self._counts_usage else self._chunk_end,
            )
            self._seed = b""  # only in the first
            yield framed(chunk, event_id=self._ids.current() if self._has_ids else b"")
        if self._has_text_only and self._is_text(piece.index):
            start = b"data: " + self._chunk_start + b"[" + self.text_start % piece.index
            self._text_starts[piece.index] = start

    @abstractmethod
    def _logprobs(self, piece: Piece, *, is_first: bool) -> Json | None:
        """Returns the log-probabilities of a piece's tokens; None if it has no tokens. `is_first`
        says that the piece begins with what comes before the answer."""

    def _prompt_logprobs(self, piece: Piece) -> Json:
        """Returns the prompt's log-probabilities as vLLM shows them, if the client wants them."""
        n_top = self._n_prompt_logprobs
        if n_top is None:
            return {}
        token_ids = self._generation.prompt_of(piece.index).token_ids
        listed = logprobs_shape.prompt_logprobs(
            self._generation.token_texts, token_ids, piece.prompt_logprobs, n_top=n_top
        )
        return {"prompt_logprobs": listed}

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> Json: ...

    def _end(self, pieces: Sequence[Piece]) -> Json:
        """Returns the fields that a complete answer has after its usage."""
        return {}

    @abstractmethod
    def _chunk_choices(self, piece: Piece, *, is_first: bool) -> Iterator[tuple[Piece, Json]]:
        """Yields the choices of a piece's chunks, each with the part of the piece that it has."""

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.id_prefix + self._generation.request_id,
            "object": kind,
            "created": created_at(self._generation.request_id),
            "model": self._generation.model,
        }

    def _choice(self, piece: Piece, content: Json, *, is_first: bool = False) -> Json:
        wants_logprobs = self._generation.options.n_logprobs is not None
        choice = {
            "index": piece.index,
            **content,
            "logprobs": self._logprobs(piece, is_first=is_first) if wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if self._generation.options.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _prompt_token_ids(self, index: int) -> Json:
        """Returns the prompt's tokens, if the client wants to see tokens."""
        if not self._generation.options.return_token_ids:
            return {}
        return {"prompt_token_ids": tuple(self._generation.prompt_of(index).token_ids)}

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def model_object(pipeline: Pipeline, name: str) -> Json:
    """Returns one entry of the list of models: the model by one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "orcinus",
        "max_model_len": pipeline.max_model_len,
    }


def model_list(pipeline: Pipeline, names: Sequence[str]) -> Json:
    """Returns the list of models, which has an entry for each name of the one model."""
    return {"object": "list", "data": [model_object(pipeline, name) for name in names]}
