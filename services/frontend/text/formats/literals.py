"""Converts values in the text of a model to JSON while the text arrives. The values may be JSON,
literals of Python, or in Gemma's notation.

    {"a": [1, true]}    {'a': (1, True), 'b': None}    {a:[1,true],b:<|"|>text<|"|>}

The reader accepts all three notations, mixed in any way, and also commas before closing brackets.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.text.formats.arriving_text import SPACES, ArrivingText, Steps

GEMMA_QUOTE = '<|"|>'
"""Mark before and after a string in Gemma's notation. Inside the string nothing is escaped."""

QUOTES = ('"""', "'''", '"', "'")
"""Quotes that may surround a string, longer ones first."""

MAX_DEPTH = 128
"""Largest number of brackets that may be open at the same time."""

_OPENING = {"[": "]", "(": ")", "{": "}"}
_WORD = re.compile(r"""[^\s,:=\[\](){}'"<>]+""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN = re.compile(r"""[^\\'"]+""")
_HEX = re.compile(r"[0-9a-fA-F]")
_OCTAL = re.compile(r"[0-7]")

_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false"}
_WORDS |= {"null": "null", "None": "null"}

_ESCAPES = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "/": "/"}

_N_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def escaped(text: str) -> str:
    """Returns a text with the escapes that it needs inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def word_as_json(word: str) -> str | None:
    """Returns a word as JSON if it is a number or a constant. Returns None for any other word."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


def word_or_text_as_json(word: str) -> str:
    """Returns a number or a constant as JSON, and any other word as a JSON string."""
    return word_as_json(word) or json.dumps(word, ensure_ascii=False)


def literal_as_json(text: str) -> str | None:
    """Returns a text as JSON if the whole text is one value. Returns None otherwise."""
    arriving, parts = ArrivingText(), list[str]()
    arriving.add(f"{text}\n")
    arriving.end()
    try:
        next(_whole(arriving, parts))
    except StopIteration as end:
        return "".join(parts) if end.value else None
    raise AssertionError("a text that has ended needs no more text")


def _whole(text: ArrivingText, parts: list[str]) -> Steps[bool]:
    is_read = yield from LiteralReader(text, parts.append).read()
    yield from text.run(SPACES)
    return is_read and text.is_read


@dataclass(slots=True)
class _Level:
    """An open bracket, with the state of the value inside it."""

    closing: str
    n_members: int = 0

    @property
    def is_object(self) -> bool:
        """Whether the bracket opens an object, whose members have keys."""
        return self.closing == "}"


class LiteralReader:
    """Reads one value from an arriving text, and passes the value on as JSON."""

    def __init__(
        self,
        text: ArrivingText,
        pass_on: Callable[[str], None],
        to_json: Callable[[str], str | None] = word_as_json,
    ) -> None:
        """`to_json` returns a word without quotes as JSON, or None if the word is no value."""
        self._text = text
        self._pass_on = pass_on
        self._to_json = to_json
        self._open: list[_Level] = []
        self._owes_comma = False
        self._last = ": "  # what was passed on last; a value must follow

    def read(self) -> Steps[bool]:
        """Reads the value. Returns False if the text ends inside the value or directly after a
        word, or if the value is in none of the notations. The JSON of what was read before is
        passed on in any case."""
        while True:
            yield from self._text.run(SPACES)
            first = yield from self._text.peek()
            if not (self._open and self._close(first)):
                if self._open and not (yield from self._begin_member()):
                    return False
                first = yield from self._text.peek()
                if first in _OPENING and len(self._open) < MAX_DEPTH:
                    self._begin(first)
                    continue
                if not (yield from self._read_scalar()):
                    return False
            if not (yield from self._end_member()):
                return False
            if not self._open:
                return True

    def read_all(self) -> Steps[bool]:
        """Reads the value as `read` does. If a part of the text is in none of the notations, the
        JSON is closed before this part, and the rest of the text is not read."""
        is_read = yield from self.read()
        if not is_read and not self._text.is_read:
            self._owes_comma = False
            if self._last.endswith(": "):
                self._put("null")
            while self._open:
                self._put("}" if self._open.pop().is_object else "]")
        return is_read

    def _put(self, text: str) -> None:
        """Passes on a part of the JSON. If a comma between two members is due, it precedes this
        part."""
        self._last = f", {text}" if self._owes_comma else text
        self._owes_comma = False
        self._pass_on(self._last)

    def _begin(self, bracket: str) -> None:
        self._text.take(1)
        level = _Level(_OPENING[bracket])
        self._open.append(level)
        self._put("{" if level.is_object else "[")

    def _close(self, bracket: str) -> bool:
        """Moves past a closing bracket. Returns False if another character comes next."""
        if bracket != self._open[-1].closing:
            return False
        self._text.take(1)
        self._put("}" if self._open.pop().is_object else "]")
        return True

    def _begin_member(self) -> Steps[bool]:
        """Moves to the next value inside the open bracket. In an object, first reads the member's
        key. Returns False if the key or the colon after it is missing or incomplete."""
        level = self._open[-1]
        if level.n_members:
            self._owes_comma = True
        level.n_members += 1
        if not level.is_object:
            return True
        quote = yield from self._quote()
        if quote:
            if not (yield from self._read_string(quote)):
                return False
        else:
            word = yield from self._text.run(_WORD)
            if not word or self._text.is_read:
                return False
            self._put(json.dumps(word, ensure_ascii=False))
        yield from self._text.run(SPACES)
        if not (yield from self._text.begins_with(":")):
            if not self._text.is_read:
                self._put(": ")
            return False
        self._text.take(1)
        self._put(": ")
        yield from self._text.run(SPACES)
        return True

    def _end_member(self) -> Steps[bool]:
        """Moves past the closing brackets after a value, and past the comma after them. Returns
        False if something else follows."""
        while self._open:
            yield from self._text.run(SPACES)
            first = yield from self._text.peek()
            if first == ",":
                self._text.take(1)
                return True
            if not self._close(first):
                return False
        return True

    def _quote(self) -> Steps[str]:
        """Returns the quote that comes next. Returns an empty text if no quote comes next."""
        first = yield from self._text.peek()
        if not first or first not in "\"'<":
            return ""
        for quote in (*QUOTES, GEMMA_QUOTE):
            if quote.startswith(first) and (yield from self._text.begins_with(quote)):
                return quote
        yield from self._text.skip_cut(GEMMA_QUOTE)
        return ""

    def _read_scalar(self) -> Steps[bool]:
        quote = yield from self._quote()
        if quote:
            return (yield from self._read_string(quote))
        word = yield from self._text.run(_WORD)
        value = self._to_json(word) if word and not self._text.is_read else None
        if value is None:
            return False
        self._put(value)
        return True

    def _read_string(self, quote: str) -> Steps[bool]:
        """Reads a string up to its closing quote. Returns False if the text ends inside the
        string."""
        text = self._text
        text.take(len(quote))
        self._put('"')
        if quote == GEMMA_QUOTE:
            is_whole = bool((yield from text.until(quote, self._pass_on_escaped, _drop)))
        else:
            is_whole = yield from self._read_escaped(quote)
        if is_whole:
            text.take(len(quote))
            self._put('"')
        return is_whole

    def _pass_on_escaped(self, text: str) -> None:
        self._put(escaped(text))

    def _read_escaped(self, quote: str) -> Steps[bool]:
        text = self._text
        while first := (yield from text.peek()):
            if first == "\\":
                text.take(1)
                if not (yield from self._read_escape()):
                    return False
            elif first != quote[0]:
                self._pass_on_escaped((yield from text.run(_PLAIN)) or text.take(1))
            elif (yield from text.begins_with(quote)):
                return True
            else:
                self._pass_on_escaped(text.take(1))
        return False

    def _read_escape(self) -> Steps[bool]:
        """Reads the characters of an escape after its backslash. Returns False if the text ends
        there. Unknown escapes are not changed."""
        text = self._text
        kind = yield from text.peek()
        if not kind:
            return False
        if kind in _ESCAPES:
            text.take(1)
            self._pass_on_escaped(_ESCAPES[kind])
        elif kind in "01234567":
            digits = yield from self._digits(_OCTAL, 3)
            self._pass_on_escaped(chr(int(digits, 8)))
        elif kind in _N_HEX_DIGITS:
            text.take(1)
            n_digits = _N_HEX_DIGITS[kind]
            digits = yield from self._digits(_HEX, n_digits)
            self._put(_character(kind, digits, n_digits))
            return len(digits) == n_digits or bool((yield from text.peek()))
        else:
            self._pass_on_escaped("\\")
        return True

    def _digits(self, digit: re.Pattern[str], most: int) -> Steps[str]:
        digits = ""
        while len(digits) < most:
            following = yield from self._text.peek()
            if not following or not digit.match(following):
                break
            digits += self._text.take(1)
        return digits


def _character(kind: str, digits: str, n_digits: int) -> str:
    """Returns the character whose code point is given by the hexadecimal `digits`, as a part of a
    JSON string. Half of a surrogate pair stays an escape, because two halves make one character."""
    if len(digits) == n_digits:
        code = int(digits, 16)
        if 0xD800 <= code < 0xE000:
            return f"\\u{code:04x}"
        if code <= 0x10FFFF:
            return escaped(chr(code))
    return escaped(f"\\{kind}{digits}")


def _drop(text: str) -> None:
    """Drops a text: the beginning of a mark at the end of a text that is cut off."""
