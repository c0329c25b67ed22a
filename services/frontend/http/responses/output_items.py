"""The items of an answer while they are generated, and the events that report how they grow. Each
kind of item has its own events.

An item begins, grows as its text arrives, and ends. The methods yield the name and the fields of
each event; the reply adds the number of the event. The event that ends an item repeats the item's
whole text, so the text is kept until then.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import ClassVar

import pydantic_core

from services.frontend.http.protocol.message_items import Item
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob
from services.frontend.http.responses import reasoning_text
from services.frontend.http.responses.answer import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputSearchCall,
    OutputText,
    ReasoningText,
    Status,
)
from services.frontend.http.responses.custom_input import CustomInput

NamedFields = tuple[str, Mapping[str, object]]
"""Type of an event: its name without the prefix `response.`, and its fields."""


class GrowingItem(ABC):
    """An item of an answer that is still being generated."""

    prefix: ClassVar[str]
    """Prefix of the item's id, which depends on the kind of item."""

    def __init__(self, item: Item, request_id: str) -> None:
        self.id = f"{self.prefix}{request_id}_{item.index}"
        self._index = item.index
        self._text = StringIO()

    @property
    def text(self) -> str:
        """Text of the item that has been generated so far."""
        return self._text.getvalue()

    def begin(self) -> Iterator[NamedFields]:
        """Yields the events that report the beginning of the item."""
        item = self.output("in_progress")
        yield "output_item.added", {"output_index": self._index, "item": item}

    def grow(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[NamedFields]:
        """Adds a new text to the item and yields the events that report it. `logprobs` are the
        log-probabilities of the text's tokens. Only a message shows them."""
        self._text.write(text)
        yield from self._grown(text)

    def end(self, status: Status) -> Iterator[NamedFields]:
        """Yields the events that report the end of the item."""
        yield from self._ended()
        yield "output_item.done", {"output_index": self._index, "item": self.output(status)}

    @abstractmethod
    def output(self, status: Status) -> OutputItem:
        """Returns the item with its text so far. An item with the status `in_progress` has no text
        yet."""

    @abstractmethod
    def _grown(self, text: str) -> Iterator[NamedFields]:
        """Yields the events that report a new text, without its log-probabilities."""

    @abstractmethod
    def _ended(self) -> Iterator[NamedFields]:
        """Yields the events that repeat the whole text. These events come before the event that
        ends the item."""

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": self.id, "output_index": self._index}


class _Parted(GrowingItem):
    """An item whose text is the only part in its list `content`."""

    delta: ClassVar[str]
    """Name that is common to the events about the item's text. The name of an event adds `.delta`
    for new text, or `.done` for the whole text."""

    def begin(self) -> Iterator[NamedFields]:
        yield from super().begin()
        yield "content_part.added", {**self._place, "part": self._part()}

    def _grown(self, text: str) -> Iterator[NamedFields]:
        yield f"{self.delta}.delta", {**self._place, "delta": text}

    def _ended(self) -> Iterator[NamedFields]:
        yield f"{self.delta}.done", {**self._place, "text": self.text}
        yield "content_part.done", {**self._place, "part": self._part()}

    @abstractmethod
    def _part(self) -> OutputText | ReasoningText:
        """Returns the one part of the item, with the text so far."""

    @property
    def _place(self) -> dict[str, object]:
        return {**super()._place, "content_index": 0}


class MessageOutput(_Parted):
    """A message of the model."""

    prefix = "msg_"
    delta = "output_text"

    def __init__(self, item: Item, request_id: str) -> None:
        super().__init__(item, request_id)
        self._logprobs: list[ChatTokenLogprob] = []

    def grow(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[NamedFields]:
        self._logprobs += logprobs
        for name, fields in super().grow(text):
            yield name, {**fields, "logprobs": list(logprobs)}

    def output(self, status: Status) -> OutputMessage:
        return {
            "id": self.id,
            "status": status,
            "type": "message",
            "role": "assistant",
            "content": [] if status == "in_progress" else [self._part()],
        }

    def _ended(self) -> Iterator[NamedFields]:
        done, *others = super()._ended()
        yield done[0], {**done[1], "logprobs": self._logprobs}
        yield from others

    def _part(self) -> OutputText:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class ReasoningOutput(_Parted):
    """Reasoning of the model before a message or a call."""

    prefix = "rs_"
    delta = "reasoning_text"

    def output(self, status: Status) -> OutputReasoning:
        return {
            "id": self.id,
            "status": status,
            "type": "reasoning",
            "summary": [],
            "content": [] if status == "in_progress" else [self._part()],
        }

    def _part(self) -> ReasoningText:
        return {"type": "reasoning_text", "text": self.text}


class SealedReasoningOutput(ReasoningOutput):
    """Reasoning that also has `encrypted_content`, for a client that sends only this field back."""

    def output(self, status: Status) -> OutputReasoning:
        sealed = None if status == "in_progress" else reasoning_text.sealed(self.text)
        return {**super().output(status), "encrypted_content": sealed}


class _Call(GrowingItem):
    """A call of a tool. `name` and `namespace` are the client's names for the tool."""

    def __init__(self, item: Item, request_id: str, name: str, namespace: str | None) -> None:
        super().__init__(item, request_id)
        self._call_id = item.call_id
        self._name = name
        self._namespace = namespace


class FunctionOutput(_Call):
    """A call of a function."""

    prefix = "fc_"

    def output(self, status: Status) -> OutputCall:
        call: OutputCall = {
            "id": self.id,
            "status": status,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }
        if self._namespace is not None:
            call["namespace"] = self._namespace
        return call

    def _grown(self, text: str) -> Iterator[NamedFields]:
        yield "function_call_arguments.delta", {**self._place, "delta": text}

    def _ended(self) -> Iterator[NamedFields]:
        yield "function_call_arguments.done", {**self._place, "arguments": self.text}


class CustomOutput(_Call):
    """A call of a custom tool, whose input is a text. The model writes the input as a JSON string
    in the arguments of a function. `grow` takes new characters of these arguments, and reports the
    new characters of the input."""

    prefix = "ctc_"

    def __init__(self, item: Item, request_id: str, name: str, namespace: str | None) -> None:
        super().__init__(item, request_id, name, namespace)
        self._input = CustomInput()

    def grow(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[NamedFields]:
        if new := self._input.feed(text):
            yield from super().grow(new)

    def end(self, status: Status) -> Iterator[NamedFields]:
        if new := self._input.end():
            yield from super().grow(new)
        yield from super().end(status)

    def output(self, status: Status) -> OutputCustomCall:
        call: OutputCustomCall = {
            "id": self.id,
            "status": status,
            "type": "custom_tool_call",
            "call_id": self._call_id,
            "name": self._name,
            "input": self.text,
        }
        if self._namespace is not None:
            call["namespace"] = self._namespace
        return call

    def _grown(self, text: str) -> Iterator[NamedFields]:
        yield "custom_tool_call_input.delta", {**self._place, "delta": text}

    def _ended(self) -> Iterator[NamedFields]:
        yield "custom_tool_call_input.done", {**self._place, "input": self.text}


class SearchOutput(_Call):
    """A call of the search for tools. New text of its arguments causes no events."""

    prefix = "tsc_"

    def output(self, status: Status) -> OutputSearchCall:
        return {
            "id": self.id,
            "status": status,
            "type": "tool_search_call",
            "call_id": self._call_id,
            "execution": "client",
            "arguments": {} if status == "in_progress" else _value_of(self.text),
        }

    def _grown(self, text: str) -> Iterator[NamedFields]:
        yield from ()

    def _ended(self) -> Iterator[NamedFields]:
        yield from ()


def _value_of(text: str) -> object:
    """Returns the value of a JSON text. Returns the text itself if it is not JSON."""
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return text
