"""Reads text that is nearly JSON, as models write the arguments of calls.

Beyond JSON, the following are accepted: raw newlines and tabs in strings, backslashes that escape
nothing (`\\d`), strings in single quotes, names without quotes, `None`, `True`, `False`, `NaN` and
`undefined`, commas after the last element, brackets after the end, and comments (`//`, `/* */`,
`#`).
"""

import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import pydantic_core

MAX_DEPTH = 128
"""Largest depth of nested lists and objects that are read."""

MAX_DIGITS = 4096
"""Largest number of characters that a number may have."""

_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NAME = re.compile(r"[^\W\d][\w$.-]*")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_CHARACTERS = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_AFTER_STRING = re.compile(r"\s*(?:[,:}\]]|//|/\*|#|$)")
_ESCAPES = {
    '"': '"',
    "'": "'",
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_WORDS = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
    "undefined": None,
    "NaN": None,
}


def object_of(text: str, *, is_cut: bool = False) -> dict[str, Any] | None:
    """Returns the object in a text that is JSON or nearly JSON. Returns None if the text is
    neither, or has another value. An empty text stands for an empty object. If the text is cut off
    (`is_cut`), the object has only the members that are complete."""
    if not text.strip():
        return {}
    try:
        value = _value_of(text, is_cut=is_cut)
    except ValueError:
        return None
    return value if isinstance(value, dict) and _is_finite(value) else None


def string_of(text: str) -> str | None:
    """Returns the value of a text that is a JSON string or nearly one. Returns None if the text is
    neither."""
    try:
        value = _value_of(text, is_cut=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _value_of(text: str, *, is_cut: bool) -> Any:
    """Returns the value of a text that is JSON or nearly JSON.

    Raises:
        ValueError: the text is neither JSON nor nearly JSON.
    """
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return _Reader(text, is_cut=is_cut).whole()


def _is_finite(value: Any) -> bool:
    """Returns whether all numbers in a value are finite. A number such as 1e999 is read as
    infinite, which JSON cannot express."""
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return all(map(_is_finite, value.values()))
        case list():
            return all(map(_is_finite, value))
    return True


class _Cut(Exception):
    """Raised if the text ends inside a value."""


class _Reader:
    """Reads one value from a text."""

    def __init__(self, text: str, *, is_cut: bool) -> None:
        self._text = text
        self._is_cut = is_cut
        self._at = 0
        self._depth = 0

    def whole(self) -> Any:
        """Returns the value of the whole text.

        Raises:
            ValueError: the text is neither JSON nor nearly JSON.
        """
        self._skip_space()
        try:
            value = self._value()
        except _Cut:
            raise ValueError("the text ends inside a value") from None
        if self._text[self._at :].strip("}] \t\r\n"):
            self._fail()
        return value

    def _value(self) -> Any:
        match self._peek():
            case "{":
                return self._object()
            case "[":
                return self._list()
            case '"' | "'":
                return self._string()
            case _:
                return self._scalar()

    def _object(self) -> dict[str, Any]:
        members: dict[str, Any] = {}

        def read_member() -> None:
            name = self._string() if self._peek() in "\"'" else self._take(_NAME)
            self._skip_space()
            if self._peek() != ":":
                self._fail()
            self._at += 1
            self._skip_space()
            members[name] = self._value()

        self._elements("}", read_member)
        return members

    def _list(self) -> list[Any]:
        elements: list[Any] = []
        self._elements("]", lambda: elements.append(self._value()))
        return elements

    def _elements(self, end: str, read_one: Callable[[], None]) -> None:
        """Reads a list or an object with its brackets. `read_one` reads one element, and `end` is
        the closing bracket."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail()
        self._at += 1
        try:
            self._skip_space()
            while self._peek() != end:
                read_one()
                self._skip_space()
                if self._peek() == ",":
                    self._at += 1
                    self._skip_space()
                elif self._peek() != end:
                    self._fail()
            self._at += 1
        except _Cut:
            if not self._is_cut:
                raise
            self._at = len(self._text)
        self._depth -= 1

    def _string(self) -> str:
        quote = self._peek()
        self._at += 1
        parts: list[str] = []
        while True:
            match = _CHARACTERS[quote].match(self._text, self._at)
            if match is not None:
                parts.append(match[0])
                self._at = match.end()
            if self._peek() == "\\":
                parts.append(self._escaped())
                continue
            self._at += 1
            if quote == '"' or _AFTER_STRING.match(self._text, self._at):
                return _paired("".join(parts))
            parts.append(quote)  # an apostrophe

    def _escaped(self) -> str:
        """Returns the character that an escape stands for: a backslash and the characters after
        it."""
        self._at += 1
        letter = self._peek()
        self._at += 1
        if letter == "u":
            digits = _HEX.match(self._text, self._at)
            if digits is not None:
                self._at = digits.end()
                return chr(int(digits[0], 16))
        if letter == "\n":
            return ""
        return _ESCAPES.get(letter, f"\\{letter}")

    def _scalar(self) -> Any:
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            if self._at == len(self._text):
                raise _Cut
            written = number[0]
            if len(written) > MAX_DIGITS:
                self._fail()
            return int(written) if written.lstrip("+-").isdigit() else float(written)
        word = self._take(_NAME)
        if self._at == len(self._text):
            raise _Cut
        if word not in _WORDS:
            self._fail()
        return _WORDS[word]

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail()
        self._at = match.end()
        return match[0]

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _peek(self) -> str:
        """Returns the next character. Raises _Cut at the end of the text."""
        if self._at >= len(self._text):
            raise _Cut
        return self._text[self._at]

    def _fail(self) -> NoReturn:
        raise ValueError(f"unexpected text at character {self._at}")


def _paired(text: str) -> str:
    """Returns a text in which each pair of surrogates is replaced by one character, and each single
    surrogate by the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
