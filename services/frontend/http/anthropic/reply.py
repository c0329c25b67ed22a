"""The shape of answers of Anthropic's POST /v1/messages: a message of blocks, and its events.

A block of reasoning has a signature, which clients send back with it and nobody checks.
"""

from collections.abc import Iterator
from typing import Any

import pydantic_core

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.http.anthropic import errors as anthropic_errors
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

_DELTAS = {
    ItemKind.REASONING: ("thinking_delta", "thinking"),
    ItemKind.TEXT: ("text_delta", "text"),
    ItemKind.CALL: ("input_json_delta", "partial_json"),
}
"""Type of a delta, and its field that has the new characters."""


class MessagesReply(Reply):
    """Writes an answer down as a message."""

    def whole(self, piece: Piece) -> Json:
        blocks = [self._block(item, text) for item, text in whole_items(self._items, piece)]
        return self._message(blocks, piece.finish_reason)

    def begin(self) -> Iterator[Event]:
        yield named_event("message_start", {"message": self._message([], None)})
        yield named_event("ping", {})

    def explain(self, error: errors.OrcinusError) -> Event:
        return anthropic_errors.error_event(error)

    def _step(self, step: Step) -> Iterator[Event]:
        item = step.item
        match step:
            case Began():
                block = {**self._block(item, ""), **_UNSIGNED.get(item.kind, {})}
                yield _event("content_block_start", item, {"content_block": block})
            case Grew(text=text):
                kind, field = _DELTAS[item.kind]
                yield _event("content_block_delta", item, {"delta": {"type": kind, field: text}})
            case Ended():
                if item.kind is ItemKind.REASONING:
                    signature = {"type": "signature_delta", "signature": self._signature}
                    yield _event("content_block_delta", item, {"delta": signature})
                yield _event("content_block_stop", item, {})

    def _end(self, reason: FinishReason) -> Iterator[Event]:
        yield named_event("message_delta", {"delta": self._stop(reason), "usage": self._usage()})
        yield named_event("message_stop", {})

    @property
    def _signature(self) -> str:
        return self._generation.request_id

    def _block(self, item: Item, text: str) -> Json:
        match item.kind:
            case ItemKind.REASONING:
                return {"type": "thinking", "thinking": text, "signature": self._signature}
            case ItemKind.TEXT:
                return {"type": "text", "text": text}
            case ItemKind.CALL:
                call = {"id": item.call_id, "name": item.name, "input": _arguments(text)}
                return {"type": "tool_use", **call}

    def _message(self, blocks: list[Json], reason: FinishReason | None) -> Json:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": blocks,
            **self._stop(reason),
            "usage": self._usage(),
        }

    def _stop(self, reason: FinishReason | None) -> Json:
        stop_reason, stop = None, None
        if reason is FinishReason.LENGTH:
            stop_reason = "max_tokens"
        elif reason is not None and self._items.has_calls:
            stop_reason = "tool_use"
        elif reason is not None:
            stop = self._generation.stop_met(0) or None
            stop_reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": stop_reason, "stop_sequence": stop}

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            # Of Anthropic's fields, the three of the input add up to it.
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


_UNSIGNED: dict[ItemKind, Json] = {ItemKind.REASONING: {"signature": ""}}
"""Fields of a block that begins, as far as they are other than of a complete one."""


def _event(name: str, item: Item, fields: Json) -> Event:
    return named_event(name, {"index": item.index, **fields})


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call; of those that were cut short, what there is."""
    try:
        value = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
