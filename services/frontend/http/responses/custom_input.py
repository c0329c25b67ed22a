"""Reads the input of a custom tool from the arguments that the model writes.

The input is a text. The model sees a function with one parameter, and so writes the text as a
string in JSON: `{"input": "…"}`. `CustomInput` returns the characters of the text as soon as they
are read. Models write strings that are nearly JSON: raw line ends, unknown escapes and quotes
without a backslash are part of the text. If the arguments do not begin in this form, they are read
as a whole when they end. If they are then neither an object with a text `input` nor a JSON string,
they themselves are the input.
"""

import re
from enum import Enum, auto

import pydantic_core

INPUT = "input"
"""Name of the one parameter of the function that stands for a custom tool."""

_OPENING = f'{{"{INPUT}":"'
_CLOSING = re.compile(r'"\s*\}\s*\Z')
_LETTERS = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u(?P<code>[0-9a-fA-F]{4})"
    r'|\\(?P<letter>["\\/bfnrt])'
)
_CUT_ESCAPE = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?\Z"
)
"""Matches an incomplete escape at the end of a text, or an incomplete pair of escapes that make one
character."""


def escaped(text: str) -> str:
    """Returns the arguments by which the model sees an earlier call of a custom tool with the input
    `text`: a JSON object with the field `input`."""
    return pydantic_core.to_json({INPUT: text}).decode()


class _State(Enum):
    """The place that a reader has reached in the arguments."""

    OPENING = auto()
    TEXT = auto()
    AFTER_QUOTE = auto()
    UNSURE = auto()
    """The reader is behind a quote. Whether the quote ends the input is known only when the
    arguments end."""
    NO_OBJECT = auto()


class CustomInput:
    """Reads the arguments of one call of a custom tool."""

    def __init__(self) -> None:
        self._state = _State.OPENING
        self._read: list[str] = []
        self._held = ""
        """Characters of the arguments that have been read but not returned. Always empty in the
        state `UNSURE`."""
        self._unsure: list[str] = []

    def feed(self, text: str) -> str:
        """Takes new characters of the arguments, and returns new characters of the input, if there
        are any."""
        self._read.append(text)
        match self._state:
            case _State.NO_OBJECT:
                return ""
            case _State.UNSURE:
                self._unsure.append(text)
                return ""
        self._held += text
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.AFTER_QUOTE:
            return self._after_quote()
        return self._take_text() if self._state is _State.TEXT else ""

    def end(self) -> str:
        """Takes the end of the arguments, and returns the characters of the input that `feed` has
        held back."""
        match self._state:
            case _State.TEXT:
                return _read_string(self._held, is_last=True)[0]
            case _State.UNSURE if self._whole() is None:
                rest = _CLOSING.sub("", "".join(self._unsure))
                return '"' + _read_string(rest, is_last=True)[0]
            case _State.NO_OBJECT:
                whole = self._whole()
                return "".join(self._read) if whole is None else whole
        return ""

    def _open(self) -> None:
        """Looks for the beginning of the input in the arguments, `{"input": "`. Once this beginning
        is complete, drops it and goes to the state `TEXT`. If the arguments begin otherwise, goes
        to the state `NO_OBJECT`."""
        compact = "".join(self._held.split())
        if not compact.startswith(_OPENING):
            if not _OPENING.startswith(compact):
                self._state = _State.NO_OBJECT
            return
        n_seen = 0
        for place, character in enumerate(self._held, 1):
            n_seen += not character.isspace()
            if n_seen == len(_OPENING):
                self._held = self._held[place:]
                break
        self._state = _State.TEXT

    def _take_text(self) -> str:
        """Returns the characters of the input that can be read so far, up to a quote that may end
        the input."""
        new, self._held = _read_string(self._held)
        if not self._held.startswith('"'):
            return new
        self._held = self._held[1:]
        self._state = _State.AFTER_QUOTE
        return new + self._after_quote()

    def _after_quote(self) -> str:
        """Decides by the characters that follow a quote whether the quote ends the input. Returns
        the quote and the text after it if the quote is part of the input. Returns an empty text if
        the quote ends the input, or if more characters are needed to decide."""
        compact = "".join(self._held.split())
        if compact in ("", "}"):
            return ""
        if compact.startswith(("}", ",")):
            self._state = _State.UNSURE
            self._unsure.append(self._held)
            return ""
        self._state = _State.TEXT
        return '"' + self._take_text()

    def _whole(self) -> str | None:
        """Returns the input if the arguments are complete JSON: either an object with a text
        `input`, or a string. Otherwise returns None."""
        try:
            value = pydantic_core.from_json("".join(self._read))
        except ValueError:
            return None
        if isinstance(value, dict):
            value = value.get(INPUT)
        return value if isinstance(value, str) else None


def _read_string(text: str, *, is_last: bool = False) -> tuple[str, str]:
    """Decodes `text`, which comes from inside a JSON string. Returns the decoded characters, and
    the rest of `text` that cannot be decoded yet. The rest begins with a quote, which may end the
    string, or with an incomplete escape. With `is_last` such quotes and escapes are read as
    characters of the string, and the rest is empty."""
    found: list[str] = []
    place = 0
    while place < len(text):
        if text[place] == '"':
            if not is_last:
                break
            found.append('"')
            place += 1
        elif plain := _PLAIN.match(text, place):
            found.append(plain[0])
            place = plain.end()
        elif not is_last and _CUT_ESCAPE.match(text, place):
            break
        elif escape := _ESCAPE.match(text, place):
            found.append(_character(escape))
            place = escape.end()
        else:
            found.append("\\")
            place += 1
    return "".join(found), text[place:]


def _character(escape: re.Match[str]) -> str:
    """Returns the character that an escape stands for. A lone surrogate becomes the replacement
    character U+FFFD, because it stands for no character."""
    if letter := escape["letter"]:
        return _LETTERS[letter]
    if code := escape["code"]:
        return chr(int(code, 16)) if not "d800" <= code.lower() <= "dfff" else "\ufffd"
    return bytes.fromhex(escape["high"] + escape["low"]).decode("utf-16-be")
