"""The shape of answers of POST /v1/responses: a response of items, and the events of its stream.

Every event has its place in the stream as `sequence_number`. Events that end an item, and the last
one, repeat texts, so these are kept until then, and counted as the call's memory.
"""

import itertools
from collections.abc import Iterator
from io import StringIO

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai.reply import Json
from services.frontend.http.protocol.message_items import (
    Began,
    Ended,
    Grew,
    Item,
    ItemKind,
    Step,
    whole_items,
)
from services.frontend.http.protocol.reply import Reply, named_event
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.request_id import created_at

KEPT_BYTES = 4
"""Bytes of memory that a character takes at most while it is kept."""

_PREFIXES = {ItemKind.REASONING: "rs_", ItemKind.TEXT: "msg_", ItemKind.CALL: "fc_"}

_DELTAS = {
    ItemKind.REASONING: "response.reasoning_text",
    ItemKind.TEXT: "response.output_text",
    ItemKind.CALL: "response.function_call_arguments",
}


class ResponsesReply(Reply):
    """Writes an answer down as a response; `echo` are the fields that repeat the request."""

    def __init__(self, generation: Generation, echo: Json) -> None:
        super().__init__(generation)
        self._echo = echo
        self._numbers = itertools.count()
        self._output: list[Json] = []
        """Items that are complete."""
        self._text = StringIO()
        """The text of the item that grows."""

    def whole(self, piece: Piece) -> Json:
        items = whole_items(self._items, piece)
        reason = piece.finish_reason
        output = [
            self._item(item, text, _status(reason) if item.index == len(items) - 1 else "completed")
            for item, text in items
        ]
        return self._response(_status(reason), output)

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
        place: Json = {"item_id": self._item_id(item), "output_index": item.index}
        if item.kind is not ItemKind.CALL:
            place["content_index"] = 0
        match step:
            case Began():
                yield from self._began(item, place)
            case Grew(text=text):
                self._generation.keep(KEPT_BYTES * len(text))
                self._text.write(text)
                yield self._event(f"{_DELTAS[item.kind]}.delta", _grown(item, place, "delta", text))
            case Ended(reason=reason):
                yield from self._ended(item, place, _status(reason))

    def _began(self, item: Item, place: Json) -> Iterator[Event]:
        added = self._item(item, None, "in_progress")
        yield self._event("response.output_item.added", {"output_index": item.index, "item": added})
        if item.kind is not ItemKind.CALL:
            yield self._event("response.content_part.added", {**place, "part": _part(item, "")})

    def _ended(self, item: Item, place: Json, status: str) -> Iterator[Event]:
        text = self._text.getvalue()
        self._text = StringIO()
        name = "arguments" if item.kind is ItemKind.CALL else "text"
        yield self._event(f"{_DELTAS[item.kind]}.done", _grown(item, place, name, text))
        if item.kind is not ItemKind.CALL:
            yield self._event("response.content_part.done", {**place, "part": _part(item, text)})
        done = self._item(item, text, status)
        self._output.append(done)
        yield self._event("response.output_item.done", {"output_index": item.index, "item": done})

    def _end(self, reason: FinishReason) -> Iterator[Event]:
        status = _status(reason)
        response = self._response(status, self._output)
        yield self._event(f"response.{status}", {"response": response})

    def _event(self, name: str, fields: Json) -> Event:
        return named_event(name, {"sequence_number": next(self._numbers), **fields})

    def _item_id(self, item: Item) -> str:
        return f"{_PREFIXES[item.kind]}{self._generation.request_id}_{item.index}"

    def _item(self, item: Item, text: str | None, status: str) -> Json:
        """Returns an item; one that has just begun has no text."""
        head = {"id": self._item_id(item), "status": status}
        match item.kind:
            case ItemKind.CALL:
                call = {"call_id": item.call_id, "name": item.name, "arguments": text or ""}
                return {**head, "type": "function_call", **call}
            case ItemKind.REASONING:
                parts = [] if text is None else [_part(item, text)]
                return {**head, "type": "reasoning", "summary": [], "content": parts}
            case ItemKind.TEXT:
                parts = [] if text is None else [_part(item, text)]
                return {**head, "type": "message", "role": "assistant", "content": parts}

    def _response(self, status: str, output: list[Json]) -> Json:
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
        }

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(reason: FinishReason | None) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def _part(item: Item, text: str) -> Json:
    if item.kind is ItemKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _grown(item: Item, place: Json, name: str, text: str) -> Json:
    grown = {**place, name: text}
    if item.kind is ItemKind.TEXT:
        grown["logprobs"] = []
    return grown
