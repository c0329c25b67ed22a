"""The reply of POST /v1/responses: a response of items, and the events of the response.

The field `sequence_number` of an event is its position in the stream. The events that end an item
repeat the text of the item, and the last event repeats all texts. All texts are therefore kept
until the end of the stream, and their memory is counted for the request.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.protocol.message_items import Began, Ended, Grew, Item, ItemKind, Step
from services.frontend.http.protocol.message_reply import MessageReply
from services.frontend.http.protocol.reply import named_event
from services.frontend.http.protocol.text_logprobs import TextLogprobs
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob
from services.frontend.http.responses.answer import (
    OutputItem,
    RequestEcho,
    Response,
    ResponseUsage,
    Status,
)
from services.frontend.http.responses.output_items import (
    CustomOutput,
    FunctionOutput,
    GrowingItem,
    MessageOutput,
    NamedFields,
    ReasoningOutput,
    SealedReasoningOutput,
    SearchOutput,
)
from services.frontend.http.responses.tool_table import ToolTable
from services.frontend.http.responses.tools import FreeformTool, SearchTool
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import LOGPROB_BYTES
from services.frontend.request.request_id import created_at

KEPT_BYTES = 8
"""Largest number of bytes of memory that a character of kept text takes. The input of a custom tool
is kept twice: as arguments of a function, and as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRules:
    """Facts about a request that decide which fields the answer and its items have."""

    echo: RequestEcho
    """Fields of the response that repeat the request."""
    tools: ToolTable
    """The tools of the request, and their names."""
    has_logprobs: bool = False
    """Whether texts have the log-probabilities of their tokens."""
    seals_reasoning: bool = False
    """Whether reasoning has `encrypted_content`."""


class ResponsesReply(MessageReply):
    """Writes an answer in the form of POST /v1/responses."""

    __slots__ = ("_growing", "_logprobs", "_numbers", "_output", "_rules")

    def __init__(self, generation: Generation, rules: ReplyRules) -> None:
        super().__init__(generation)
        self._rules = rules
        self._numbers = itertools.count()
        self._output: list[OutputItem] = []  # items that are complete
        self._growing: dict[Item, GrowingItem] = {}
        self._logprobs: TextLogprobs | None = None
        if rules.has_logprobs:
            self._logprobs = TextLogprobs(generation, generation.token_texts, is_whole=False)

    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        if self._logprobs is None:
            yield from super().whole(pieces)
            return
        generation, (piece,) = self._generation, pieces
        self._logprobs = TextLogprobs(generation, generation.token_texts, is_whole=True)
        for _ in self.events(piece):
            pass
        yield to_json(self._response(_status(self._reason), self._output))

    def events(self, piece: Piece) -> Iterator[Event]:
        if self._logprobs is not None:
            self._logprobs.add(piece)
        yield from super().events(piece)

    def _message(self, items: Sequence[tuple[Item, str]]) -> Response:
        status = _status(self._reason)
        last_status: Status = "incomplete" if self._items.ends_in_call else status
        output = []
        for item, text in items:
            growing = self._new(item)
            own_status = last_status if item.index == len(items) - 1 else "completed"
            for _ in (*growing.grow(text), *growing.end(own_status)):
                pass
            output.append(growing.output(own_status))
        return self._response(status, output)

    def begin(self) -> Iterator[Event]:
        response = self._response("in_progress", [])
        yield self._event("created", {"response": response})
        yield self._event("in_progress", {"response": response})

    def explain(self, error: errors.OrcinusError) -> Event:
        code = "rate_limit_exceeded" if isinstance(error, errors.PoolFull) else "server_error"
        response = self._response("failed", self._output)
        response["error"] = {"code": code, "message": error.message}
        return self._event("failed", {"response": response})

    def _step(self, step: Step) -> Iterator[Event]:
        item = step.item
        match step:
            case Began():
                growing = self._growing[item] = self._new(item)
                yield from self._events(growing.begin())
            case Grew(text=text):
                self._generation.keep(KEPT_BYTES * len(text))
                yield from self._events(self._growing[item].grow(text, self._logprobs_of(step)))
            case Ended(reason=reason, is_cut=is_cut):
                growing = self._growing.pop(item)
                status: Status = "incomplete" if is_cut else _status(reason)
                events = list(self._events(growing.end(status)))
                self._output.append(growing.output(status))
                yield from events

    def end(self) -> Iterator[Event]:
        status = _status(self._reason)
        yield self._event(status, {"response": self._response(status, self._output)})

    def _logprobs_of(self, step: Grew) -> Sequence[ChatTokenLogprob]:
        """Returns the log-probabilities of new text of a message. Counts their memory, because they
        are kept until the end of the stream. The result is empty if the item is not a message, or
        if the request asks for no log-probabilities."""
        if self._logprobs is None or step.words is None:
            return ()
        found = self._logprobs.take(step.words)  # also for reasoning, whose tokens are dropped
        if step.item.kind is not ItemKind.TEXT:
            return ()
        self._generation.keep(LOGPROB_BYTES * sum(1 + len(one["top_logprobs"]) for one in found))
        return found

    def _events(self, named: Iterable[NamedFields]) -> Iterator[Event]:
        for name, fields in named:
            yield self._event(name, fields)

    def _event(self, name: str, fields: Mapping[str, object]) -> Event:
        numbered = {"sequence_number": next(self._numbers), **fields}
        return named_event(f"response.{name}", numbered)

    def _new(self, item: Item) -> GrowingItem:
        request_id = self._generation.request_id
        match item.kind:
            case ItemKind.TEXT:
                return MessageOutput(item, request_id)
            case ItemKind.REASONING:
                kind = SealedReasoningOutput if self._rules.seals_reasoning else ReasoningOutput
                return kind(item, request_id)
            case ItemKind.CALL:
                (namespace, name), tool = self._rules.tools.called(item.name)
                if isinstance(tool, FreeformTool):
                    return CustomOutput(item, request_id, name, namespace)
                if isinstance(tool, SearchTool):
                    return SearchOutput(item, request_id, name, namespace)
                return FunctionOutput(item, request_id, name, namespace)

    def _response(self, status: Status | Literal["failed"], output: list[OutputItem]) -> Response:
        generation = self._generation
        is_over = status in ("completed", "incomplete")
        return {
            "id": f"resp_{generation.request_id}",
            "object": "response",
            "created_at": created_at(generation.request_id),
            "status": status,
            "model": generation.model,
            "output": output,
            "usage": self._usage() if is_over else None,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            **self._rules.echo,
            **self._note,
        }

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(reason: FinishReason | None) -> Literal["completed", "incomplete"]:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"
