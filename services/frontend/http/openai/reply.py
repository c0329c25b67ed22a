"""The common part of the replies to completions and to chats, both whole and as chunks of a stream.

The first chunk of a stream has the seed of the request. A stream that shows tokens can be resumed:
the events have ids, and a resumed stream sends only the parts of each answer that the client has
not received. Other streams have no ids, because popular clients, such as vLLM's benchmark, fail at
any line that does not begin with `data:`.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.openai import logprobs
from services.frontend.http.openai.answer import Envelope, PromptLogprobs, Usage
from services.frontend.http.openai.event_id import AnswerPosition, EventIds, StreamPosition
from services.frontend.http.protocol.json_text import text_json, to_json
from services.frontend.http.protocol.orcinus_note import note_of
from services.frontend.http.protocol.reply import Reply
from services.frontend.http.protocol.token_logprobs import TokenNames, TokenNumbers
from services.frontend.http.transport.event_stream import Event, framed
from services.frontend.request.request_id import created_at

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ends without an error."""

Choice = Mapping[str, Any]
"""Type of an answer or a piece of an answer, in the form of a completion or of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """Options of a reply that do not change which tokens are generated."""

    position: StreamPosition | None = None
    """Position from which a broken stream is resumed; None for a new stream."""
    echo: bool = False
    """Whether each answer begins with the prompt."""
    includes_usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""
    counts_usage: bool = False
    """Whether each chunk of a stream also has the usage so far."""
    n_prompt_logprobs: int | None = None
    """Number of alternatives in the field `prompt_logprobs` of a whole answer. If None, the answer
    does not have the field."""
    shows_token_ids: bool = False
    """Whether `logprobs` shows tokens by their numbers instead of their texts."""


class GenerationReply(Reply):
    """Base class of the replies to completions and to chats. A reply may begin in the middle of a
    stream, to resume it."""

    __slots__ = (
        "_chunk_end",
        "_chunk_start",
        "_generation",
        "_has_ids",
        "_has_text_only",
        "_ids",
        "_lacks_usage",
        "_options",
        "_seed",
        "_text_end",
        "_text_starts",
    )

    id_prefix: str
    answer_object: str
    chunk_object: str
    text_start: bytes
    """Beginning of the JSON of a choice that has only text, up to the text. `%d` stands for the
    index of the answer."""
    text_end: bytes
    """End of the JSON of a choice that has only text, after the text."""

    def __init__(self, generation: Generation, options: ReplyOptions) -> None:
        self._generation = generation
        self._options = options
        position = options.position
        self._lacks_usage = options.includes_usage and not (position and position.has_usage)
        nowhere = (AnswerPosition(),) * generation.n_answers
        self._ids = EventIds(
            generation.request_id, nowhere if position is None else position.answers
        )
        self._has_ids = generation.options.return_token_ids
        # All chunks of a stream share a beginning and an end, which are serialized once.
        self._chunk_start = to_json(self._envelope(self.chunk_object))[:-1] + b',"choices":'
        self._chunk_end = b',"usage":null}' if options.includes_usage else b"}"
        self._text_starts: dict[int, bytes] = {}  # start of chunks with only text, by index
        self._text_end = self.text_end + b"]" + self._chunk_end + b"\n\n"
        wants_more = generation.options.n_logprobs is not None or options.counts_usage
        self._has_text_only = not wants_more and not self._has_ids
        self._seed = b',"seed":%d' % generation.options.sampling.seed if position is None else b""

    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        yield to_json(self._envelope(self.answer_object))[:-1] + b',"choices":['
        for place, piece in enumerate(pieces):
            yield (b"," if place else b"") + to_json(self._whole_choice(piece))
        note = note_of([piece.schema_valid for piece in pieces], self.unenforced)
        yield b"]," + to_json({"usage": self._usage(), **self._after_usage(pieces), **note})[1:]

    def events(self, piece: Piece) -> Iterable[Event]:
        if piece.finish_reason is None:
            event = self.text_event(piece.index, piece.text)
            if event is not None:
                return (event,) if event else ()
        return self._events(piece)

    def text_event(self, index: int, text: str) -> Event | None:
        start = self._text_starts.get(index)
        return None if start is None else self._text_chunk(start, text)

    def end(self) -> Iterator[Event]:
        if self._lacks_usage:
            chunk = b'%b[],"usage":%b}' % (self._chunk_start, to_json(self._usage()))
            yield framed(chunk, event_id=self._ids.usage() if self._has_ids else b"")
        yield DONE

    def explain(self, error: errors.OrcinusError) -> Event:
        return openai_errors.error_event(error)

    def _text_chunk(self, start: bytes, text: str) -> Event:
        """Returns the event of a chunk that has only text. `start` is the first part of the event,
        up to the text."""
        return b"%b%b%b" % (start, text_json(text), self._text_end)

    def _start_of(self, choice: bytes) -> bytes:
        """Returns the first part of an event, up to and including `choice`. `choice` is the
        beginning of the JSON of the only choice in the event's chunk."""
        return b"data: %b[%b" % (self._chunk_start, choice)

    def _events(self, piece: Piece) -> Iterator[Event]:
        is_first = not self._ids.has_begun(piece.index)
        for part, choice in self._chunk_choices(piece, is_first=is_first):
            self._ids.advance(
                part.index, len(part.token_ids), is_finished=part.finish_reason is not None
            )
            counts_usage = self._options.counts_usage
            chunk = b"%b[%b]%b%b%b" % (
                self._chunk_start,
                to_json(choice),
                self._seed,
                b"" if part.finish_reason is None else self._note_json(part),
                b',"usage":%b}' % to_json(self._usage()) if counts_usage else self._chunk_end,
            )
            self._seed = b""  # only the first chunk has the seed
            yield framed(chunk, event_id=self._ids.current() if self._has_ids else b"")
        if self._has_text_only and self._ids.has_begun(piece.index):
            self._text_starts[piece.index] = self._start_of(self.text_start % piece.index)

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> Choice:
        """Returns a complete answer in the form of an item of `choices`."""

    def _after_usage(self, pieces: Sequence[Piece]) -> Mapping[str, object]:
        """Returns the fields that follow the usage in a whole reply."""
        return {}

    @abstractmethod
    def _chunk_choices(self, piece: Piece, *, is_first: bool) -> Iterator[tuple[Piece, Choice]]:
        """Yields the chunks that a piece of an answer becomes: for each, the part of the piece that
        the chunk shows, and the only choice of the chunk. `is_first` says that no piece of the
        answer has come before."""

    def _envelope(self, kind: str) -> Envelope:
        return {
            "id": self.id_prefix + self._generation.request_id,
            "object": kind,
            "created": created_at(self._generation.request_id),
            "model": self._generation.model,
        }

    @property
    def _token_names(self) -> TokenNames:
        texts = self._generation.token_texts
        return TokenNumbers(texts) if self._options.shows_token_ids else texts

    @property
    def _wants_logprobs(self) -> bool:
        return self._generation.options.n_logprobs is not None

    def _prompt_token_ids(self, index: int) -> tuple[int, ...]:
        return tuple(self._generation.prompt_of(index).token_ids)

    def _prompt_logprobs(self, piece: Piece, n_top: int) -> PromptLogprobs:
        """Returns the prompt's log-probabilities in vLLM's form, with the `n_top` most likely
        tokens at each position."""
        return logprobs.prompt_logprobs(
            self._generation.token_texts,
            self._generation.prompt_of(piece.index).token_ids,
            piece.prompt_logprobs,
            n_top=n_top,
        )

    def _usage(self) -> Usage:
        usage = self._generation.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _note_json(self, piece: Piece) -> bytes:
        """Returns the JSON of the field `orcinus` in the chunk that ends an answer, with a comma in
        front. The result is empty if the chunk does not have the field."""
        note = note_of([piece.schema_valid], self.unenforced)
        return b"," + to_json(note)[1:-1] if note else b""
