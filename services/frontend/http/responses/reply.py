"""The reply of POST /v1/responses: a response of items, and the events of the response.

Every event has its position in the stream as `sequence_number`. The events that end an item repeat
the text of the item, and the last event repeats all texts. Texts are therefore kept until the end
of the stream, and counted as memory of the request.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Literal

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.message_items import Began, Ended, Grew, Item, ItemKind, Step
from services.frontend.http.protocol.message_reply import MessageReply
from services.frontend.http.protocol.reply import named_event
from services.frontend.http.responses.answer import (
    OutputItem,
    OutputText,
    ReasoningText,
    RequestEcho,
    Response,
    ResponseUsage,
    Status,
)
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.request_id import created_at

Fields = Mapping[str, object]

KEPT_BYTES = 4
"""Largest number of bytes of memory that a kept character takes."""

_PREFIXES = {ItemKind.REASONING: "rs_", ItemKind.TEXT: "msg_", ItemKind.CALL: "fc_"}

_DELTAS = {
    ItemKind.REASONING: "response.reasoning_text",
    ItemKind.TEXT: "response.output_text",
    ItemKind.CALL: "response.function_call_arguments",
}


class ResponsesReply(MessageReply):
    """Writes an answer as a response. `echo` has the fields of the response that repeat the
    request."""

    __slots__ = ("_echo", "_numbers", "_output", "_text")

    def __init__(self, generation: Generation, echo: RequestEcho) -> None:
        super().__init__(generation)
        self._echo = echo
        self._numbers = itertools.count()
        self._output: list[OutputItem] = []  # items that are complete
        self._text = StringIO()  # of the item that grows

    def _message(self, items: Sequence[tuple[Item, str]]) -> Response:
        status = _status(self._reason)
        last_status: Status = "incomplete" if self._items.ends_in_call else status
        output = [
            self._item(item, text, last_status if item.index == len(items) - 1 else "completed")
            for item, text in items
        ]
        return self._response(status, output)

    def begin(self) -> Iterator[Event]:
        response = self._response("in_progress", [])
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})

    def explain(self, error: errors.OrcinusError) -> Event:
        code = "rate_limit_exceeded" if isinstance(error, errors.PoolFull) else "server_error"
        response = self._response("failed", self._output)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", {"response": response})

    def _step(self, step: Step) -> Iterator[Event]:
        item = step.item
        place: dict[str, object] = {"item_id": self._item_id(item), "output_index": item.index}
        if item.kind is not ItemKind.CALL:
            place["content_index"] = 0
        match step:
            case Began():
                yield from self._began(item, place)
            case Grew(text=text):
                self._generation.keep(KEPT_BYTES * len(text))
                self._text.write(text)
                yield self._event(f"{_DELTAS[item.kind]}.delta", _grown(item, place, "delta", text))
            case Ended(reason=reason, is_cut=is_cut):
                yield from self._ended(item, place, "incomplete" if is_cut else _status(reason))

    def _began(self, item: Item, place: Fields) -> Iterator[Event]:
        added = self._item(item, None, "in_progress")
        yield self._event("response.output_item.added", {"output_index": item.index, "item": added})
        if item.kind is not ItemKind.CALL:
            yield self._event("response.content_part.added", {**place, "part": _part(item, "")})

    def _ended(self, item: Item, place: Fields, status: Status) -> Iterator[Event]:
        text = self._text.getvalue()
        self._text = StringIO()
        name = "arguments" if item.kind is ItemKind.CALL else "text"
        yield self._event(f"{_DELTAS[item.kind]}.done", _grown(item, place, name, text))
        if item.kind is not ItemKind.CALL:
            yield self._event("response.content_part.done", {**place, "part": _part(item, text)})
        done = self._item(item, text, status)
        self._output.append(done)
        yield self._event("response.output_item.done", {"output_index": item.index, "item": done})

    def end(self) -> Iterator[Event]:
        status = _status(self._reason)
        response = self._response(status, self._output)
        yield self._event(f"response.{status}", {"response": response})

    def _event(self, name: str, fields: Fields) -> Event:
        return named_event(name, {"sequence_number": next(self._numbers), **fields})

    def _item_id(self, item: Item) -> str:
        return f"{_PREFIXES[item.kind]}{self._generation.request_id}_{item.index}"

    def _item(self, item: Item, text: str | None, status: Status) -> OutputItem:
        """Returns an item with a text. An item that has just begun has the text None."""
        item_id = self._item_id(item)
        match item.kind:
            case ItemKind.CALL:
                return {
                    "id": item_id,
                    "status": status,
                    "type": "function_call",
                    "call_id": item.call_id,
                    "name": item.name,
                    "arguments": text or "",
                }
            case ItemKind.REASONING:
                return {
                    "id": item_id,
                    "status": status,
                    "type": "reasoning",
                    "summary": [],
                    "content": [] if text is None else [_reasoning(text)],
                }
            case ItemKind.TEXT:
                return {
                    "id": item_id,
                    "status": status,
                    "type": "message",
                    "role": "assistant",
                    "content": [] if text is None else [_text(text)],
                }

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
            **self._echo,
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


def _part(item: Item, text: str) -> OutputText | ReasoningText:
    return _reasoning(text) if item.kind is ItemKind.REASONING else _text(text)


def _text(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}


def _grown(item: Item, place: Fields, name: str, text: str) -> Fields:
    logprobs: Fields = {"logprobs": []} if item.kind is ItemKind.TEXT else {}
    return {**place, name: text, **logprobs}
