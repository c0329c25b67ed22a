"""The reply of Anthropic's POST /v1/messages: a message of blocks, and the events of the message.

A block of reasoning has a signature. Clients send the signature back with the block, and the server
does not check it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.anthropic.answer import (
    AnthropicMessage,
    AnthropicText,
    AnthropicThinking,
    AnthropicToolUse,
    AnthropicUsage,
    StopReason,
)
from services.frontend.http.anthropic.errors import error_event
from services.frontend.http.protocol.message_items import Began, Ended, Grew, Item, ItemKind, Step
from services.frontend.http.protocol.message_reply import MessageReply
from services.frontend.http.protocol.reply import named_event
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text import near_json

_DELTAS = {
    ItemKind.REASONING: ("thinking_delta", "thinking"),
    ItemKind.TEXT: ("text_delta", "text"),
    ItemKind.CALL: ("input_json_delta", "partial_json"),
}
"""Maps each kind of item to the type of its deltas, and to the name of the delta's field that holds
the new characters."""


class ThinkingDisplay(Enum):
    """How an answer shows the reasoning of the model."""

    SHOWN = auto()
    """The answer has blocks of reasoning with the text of the reasoning."""
    OMITTED = auto()
    """The answer has blocks of reasoning, but the blocks have no text."""
    HIDDEN = auto()
    """The answer has no blocks of reasoning."""


Block = AnthropicText | AnthropicThinking | AnthropicToolUse


class MessagesReply(MessageReply):
    """Writes an answer as a message of Anthropic's protocol."""

    __slots__ = ("_thinking",)

    def __init__(self, generation: Generation, *, thinking: ThinkingDisplay) -> None:
        super().__init__(generation, shows_reasoning=thinking is not ThinkingDisplay.HIDDEN)
        self._thinking = thinking

    def _message(self, items: Sequence[tuple[Item, str]]) -> AnthropicMessage:
        blocks = [self._whole_block(item, text, len(items)) for item, text in items]
        has_calls = any(block["type"] == "tool_use" for block in blocks)
        return self._message_of(blocks, *self._stop(has_calls=has_calls))

    def begin(self) -> Iterator[Event]:
        yield named_event("message_start", {"message": self._message_of([], None, None)})
        yield named_event("ping", {})

    def explain(self, error: errors.OrcinusError) -> Event:
        return error_event(error)

    def _step(self, step: Step) -> Iterator[Event]:
        item = step.item
        match step:
            case Began():
                block = {**self._block(item, ""), **_UNSIGNED.get(item.kind, {})}
                yield _event("content_block_start", item, {"content_block": block})
            case Grew() if self._omits(item):
                return
            case Grew(text=text):
                kind, field = _DELTAS[item.kind]
                yield _event("content_block_delta", item, {"delta": {"type": kind, field: text}})
            case Ended():
                if item.kind is ItemKind.REASONING:
                    signature = {"type": "signature_delta", "signature": self._signature}
                    yield _event("content_block_delta", item, {"delta": signature})
                yield _event("content_block_stop", item, {})

    def end(self) -> Iterator[Event]:
        stop_reason, stop = self._stop(has_calls=self._items.has_calls)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop}
        yield named_event("message_delta", {"delta": delta, "usage": self._usage(), **self._note})
        yield named_event("message_stop", {})

    @property
    def _signature(self) -> str:
        return self._generation.request_id

    def _omits(self, item: Item) -> bool:
        """Returns whether the answer leaves out the text of an item: the item is reasoning, and the
        reasoning is to be shown as `ThinkingDisplay.OMITTED`."""
        is_reasoning = item.kind is ItemKind.REASONING
        return is_reasoning and self._thinking is ThinkingDisplay.OMITTED

    def _block(self, item: Item, text: str) -> Block:
        match item.kind:
            case ItemKind.REASONING:
                shown = "" if self._omits(item) else text
                return {"type": "thinking", "thinking": shown, "signature": self._signature}
            case ItemKind.TEXT:
                return {"type": "text", "text": text}
            case ItemKind.CALL:
                return {
                    "type": "tool_use",
                    "id": item.call_id,
                    "name": item.name,
                    "input": {},
                }

    def _whole_block(self, item: Item, text: str, n_items: int) -> Block:
        """Returns the complete block of an item. `text` is the item's whole text or, for a call,
        its arguments. A call becomes a block of text if its arguments cannot be read as an object.
        If the token limit or a stop sequence cut the arguments off, the block has only the members
        of the object that are complete."""
        block = self._block(item, text)
        if block["type"] != "tool_use":
            return block
        is_cut = self._may_be_cut and item.index == n_items - 1
        arguments = near_json.object_of(text, is_cut=is_cut)
        if arguments is None:
            name = json.dumps(item.name, ensure_ascii=False)
            return {"type": "text", "text": f'{{"name": {name}, "arguments": {text}}}'}
        return {**block, "input": arguments}

    @property
    def _may_be_cut(self) -> bool:
        """Whether the token limit or a stop sequence may have cut off the arguments of the last
        call."""
        if self._reason is FinishReason.LENGTH:
            return True
        return self._items.ends_in_call and bool(self._generation.stop_met(0))

    def _message_of(
        self, blocks: list[Block], stop_reason: StopReason | None, stop: str | None
    ) -> AnthropicMessage:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": stop,
            "usage": self._usage(),
            **self._note,
        }

    def _stop(self, *, has_calls: bool) -> tuple[StopReason, str | None]:
        """Returns the reason why the answer ended, and the stop sequence that ended it (None if no
        stop sequence did). If a stop sequence cut off the arguments of a call, the reason is
        `stop_sequence`, not `tool_use`."""
        if self._reason is FinishReason.LENGTH:
            return "max_tokens", None
        if has_calls and not self._items.ends_in_call:
            return "tool_use", None
        stop = self._generation.stop_met(0) or None
        return "end_turn" if stop is None else "stop_sequence", stop

    def _usage(self) -> AnthropicUsage:
        usage = self._generation.usage
        return {
            # In Anthropic's protocol the three fields of the input add up to the whole prompt.
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


_UNSIGNED: dict[ItemKind, Mapping[str, object]] = {ItemKind.REASONING: {"signature": ""}}
"""Fields whose value at the start of a block differs from the value in the complete block, keyed by
kind of item: a block of reasoning begins with an empty signature."""


def _event(name: str, item: Item, fields: Mapping[str, object]) -> Event:
    return named_event(name, {"index": item.index, **fields})
