"""Reads an assistant's message from the text that a model writes: its content, its reasoning and
its tool calls.

    text, piece by piece → MessageReader → MessageDelta → the shape of a protocol

Each reader reads one answer, in the format of one family of models.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """New characters of a tool call. The first delta of a call has the id and the name of the
    call."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)  # frozen, creation takes three times as long; each token creates one
class Words:
    """New text of a message: characters of its content or of its reasoning. The object must not be
    changed."""

    text: str
    is_reasoning: bool = False
    end: int = 0
    """Number of characters that the model has written up to the end of `text`, counted from the
    beginning of the answer."""


Part = Words | CallDelta


@dataclass(slots=True)  # not frozen for the same reason as `Words`
class MessageDelta:
    """The parts that a new text adds to an assistant's message, in the order in which the model
    writes them. A delta is never changed."""

    parts: tuple[Part, ...] = ()

    @property
    def only_words(self) -> Words | None:
        """The only part of this delta, if it has just one part and that part is content or
        reasoning. None otherwise."""
        if len(self.parts) != 1:
            return None
        (part,) = self.parts
        return part if isinstance(part, Words) else None

    @property
    def reasoning(self) -> str:
        """New characters of the reasoning."""
        return self._words(is_reasoning=True)

    @property
    def content(self) -> str:
        """New characters of the content, including characters between two calls."""
        return self._words(is_reasoning=False)

    @property
    def tool_calls(self) -> tuple[CallDelta, ...]:
        """New characters of tool calls, with one delta for each call."""
        return _joined(part for part in self.parts if isinstance(part, CallDelta))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __add__(self, later: "MessageDelta") -> "MessageDelta":
        """Returns a delta that has first the parts of this delta and then the parts of `later`."""
        return MessageDelta(self.parts + later.parts)

    def _words(self, *, is_reasoning: bool) -> str:
        return "".join(
            part.text
            for part in self.parts
            if isinstance(part, Words) and part.is_reasoning is is_reasoning
        )


class MessageReader(Protocol):
    """Reads the text of one answer as it comes."""

    @property
    def n_tool_calls(self) -> int:
        """Number of tool calls that have begun."""

    @property
    def ends_in_call(self) -> bool:
        """Whether the text that has been read ends inside the arguments of a call."""

    def leave_out(self, n_characters: int) -> None:
        """Notes that the model has written `n_characters` characters that this reader does not get,
        after the text that the reader has been given so far."""

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what the text adds to the message."""

    def flush(self) -> MessageDelta:
        """Ends the text, and returns the part of the message that was held back."""


class PlainReader:
    """Reads text that consists only of content."""

    n_tool_calls = 0
    ends_in_call = False

    def __init__(self) -> None:
        self._n_read = 0

    def leave_out(self, n_characters: int) -> None:
        """Notes that the model has written `n_characters` characters that this reader does not
        get."""
        self._n_read += n_characters

    def feed(self, text: str) -> MessageDelta:
        """Returns the text as content."""
        self._n_read += len(text)
        return MessageDelta((Words(text, end=self._n_read),) if text else ())

    def flush(self) -> MessageDelta:
        """Returns an empty delta, because no text is held back."""
        return MessageDelta()


def _joined(deltas: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        before = calls.get(delta.index)
        if before is not None:
            delta = CallDelta(
                index=delta.index,
                id=before.id,
                name=before.name,
                arguments=before.arguments + delta.arguments,
            )
        calls[delta.index] = delta
    return tuple(calls.values())
