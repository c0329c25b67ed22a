"""The assistant's message in the text that a model writes: its words, its reasoning, its calls.

    text, piece by piece → MessageReader → MessageDelta → the shape of a protocol

A reader belongs to one answer, and reads the format of one family of models.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """New characters of a call: the first delta of a call has its id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """New characters of an assistant's message, in the order reasoning, content, calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)

    def __add__(self, later: "MessageDelta") -> "MessageDelta":
        """Returns what both add to the message, each call in one delta."""
        return MessageDelta(
            reasoning=self.reasoning + later.reasoning,
            content=self.content + later.content,
            tool_calls=_joined((*self.tool_calls, *later.tool_calls)),
        )


class MessageReader(Protocol):
    """Reads one answer's text as it comes."""

    n_tool_calls: int
    """Calls that have begun."""

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what it adds to the message."""

    def flush(self) -> MessageDelta:
        """Returns what was held back, when the text has ended."""


class PlainReader:
    """Reads text that is nothing but the message's content."""

    n_tool_calls = 0

    def feed(self, text: str) -> MessageDelta:
        """Returns the text as content."""
        return MessageDelta(content=text)

    def flush(self) -> MessageDelta:
        """Returns nothing: nothing is held back."""
        return MessageDelta()


def _joined(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        before = calls.get(delta.index)
        if before is not None:
            delta = ToolCallDelta(
                index=delta.index,
                id=before.id,
                name=before.name,
                arguments=before.arguments + delta.arguments,
            )
        calls[delta.index] = delta
    return tuple(calls.values())
