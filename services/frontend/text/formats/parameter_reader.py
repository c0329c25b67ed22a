"""Reads calls whose arguments are written one by one, each as a name and a text, and makes a JSON
object of the arguments.

Strings are passed on as they come. Other values are converted when they are complete, to the type
that the schema of the tool demands.
"""

import json
from collections.abc import Callable

from services.frontend.text.formats.arriving_text import Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.literals import escaped
from services.frontend.text.formats.parameters import (
    TEXT,
    Parameters,
    Types,
    read_schema,
    text_as_json,
)


class ParameterReader(ToolCallReader):
    """Reads an answer in which each argument of a call is written as a name and a text."""

    has_padding = False
    """Whether the format puts a newline before and after each value. These newlines do not belong
    to the value."""

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self._parameters = Parameters({})
        self._n_values = 0

    def _begin_object(self, name: str) -> None:
        """Begins a call, and the JSON object of its arguments."""
        self._begin(name)
        self._parameters = Parameters(read_schema(self._rules.tools.get(name, "")))
        self._n_values = 0
        self._argue("{")

    def _end_object(self) -> None:
        """Ends the JSON object of a call's arguments."""
        self._argue("}")
        self._end_call()

    def _end_broken_object(self, *marks: str) -> Steps[None]:
        """Called when none of the expected marks comes next among the arguments of a call. If the
        answer ends here, leaves the JSON object of the arguments open, and drops the text if it is
        the beginning of one of `marks`. Otherwise ends the object, and the recorded text becomes
        content."""
        text = self._text
        yield from text.skip_cut(*marks)
        if text.is_read:
            text.kept()
            return
        self._end_object()
        self._say_no_call(text.kept())

    def _read_value(self, name: str, end: str, types: Types) -> Steps[bool]:
        """Reads the value of a parameter up to the mark `end`, and moves past the mark. Returns
        False if the text ends without the mark. The value is then left open."""
        self._argue(", " if self._n_values else "")
        self._argue(f"{json.dumps(name, ensure_ascii=False)}: ")
        self._n_values += 1
        text, parts = self._text, list[str]()
        if types == TEXT:
            self._argue('"')
            take: Callable[[str], None] = lambda part: self._argue(escaped(part))  # noqa: E731
        else:
            take = parts.append
        padded = _Padded(take) if self.has_padding else None
        is_whole = bool((yield from text.until(end, padded.add if padded else take, _drop)))
        if is_whole:
            text.take(len(end))
        if types == TEXT:
            self._argue('"' if is_whole else "")
        else:
            value = "".join(parts)
            self._argue(text_as_json(value, types) if is_whole else value)
        return is_whole


class _Padded:
    """Passes on a text that comes in parts, without the newline at its beginning and the newline at
    its end."""

    def __init__(self, pass_on: Callable[[str], None]) -> None:
        self._pass_on = pass_on
        self._held = ""
        self._has_begun = False

    def add(self, text: str) -> None:
        """Takes the next part of the text."""
        if not text:
            return
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._pass_on(text.removesuffix("\n"))


def _drop(text: str) -> None:
    """Drops a text: the beginning of a mark at the end of an answer that is cut off."""
