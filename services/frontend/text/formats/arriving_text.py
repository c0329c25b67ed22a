"""Reads a text that is still arriving, in one pass from its beginning.

A reader is a generator: it yields when it needs more text, and is resumed when more text has come.
So the result depends only on the whole text, not on how the text was cut into pieces. Each
character is looked at a bounded number of times.
"""

import re
from collections import deque
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""Type of the steps of reading: a generator that yields where it needs more text, and returns its
result at the end."""

SPACES = re.compile(r"[ \t\r\n]+")
NEWLINES = re.compile(r"\n+")

_IN_STRING = {
    '"': re.compile(r'[^"\\]+|\\.|"', re.DOTALL),
    "'": re.compile(r"[^'\\]+|\\.|'", re.DOTALL),
}
_OUTSIDE = re.compile(r"[^\"'{}\[\]/#]+|[\"'{}\[\]/#]")
_NOT_NEWLINE = re.compile(r"[^\n]+")

_BEFORE_STRING = ("{", "[", ",", ":")
"""Characters after which a single quote is taken as the beginning of a string."""

_AFTER_STRING = ("", " ", "\t", "\r", "\n", ",", ":", "}", "]")
"""Characters before which a single quote is taken as the end of a string. Before any other
character, it is an apostrophe."""


class ArrivingText:
    """Holds a text that is still arriving, and the position up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._n_before = 0  # characters that arrived before `_text`
        self._n_missing = 0  # characters of the answer before the position that never arrive here
        self._gaps: deque[tuple[int, int]] = deque()
        """(place, number of missing characters) for each place in the unread text at which
        characters of the answer are missing. A place is given by the number of arrived characters
        before it."""
        self._is_over = False
        self._kept: list[str] | None = None

    @property
    def position(self) -> int:
        """Number of characters of the answer up to the character that was read last, including the
        characters that were left out (`leave_out`)."""
        n_read = self._n_before + self._at
        while self._gaps and self._gaps[0][0] < n_read:
            self._n_missing += self._gaps.popleft()[1]
        return n_read + self._n_missing

    def placed(self, text: str) -> list[tuple[str, int]]:
        """Splits `text` at the places where characters of the answer are missing (`leave_out`).
        Returns each part with its end: the number of characters of the answer up to the end of the
        part, missing ones included. Call it only with a text that ends with the character that was
        read last."""
        begin, parts = self._n_before + self._at - len(text), []
        while self._gaps and self._gaps[0][0] < begin + len(text):
            place, n_missing = self._gaps.popleft()
            if place > begin:
                parts.append((text[: place - begin], place + self._n_missing))
                begin, text = place, text[place - begin :]
            self._n_missing += n_missing
        return [*parts, (text, self.position)] if text else parts

    def add(self, text: str) -> None:
        """Appends text that has arrived."""
        self._n_before += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def pass_over(self, n_characters: int) -> int:
        """Counts the next `n_characters` characters of the answer, which the caller has read
        without adding them to this object. Returns the position after them. Call it only when all
        text that has arrived here has been read."""
        self._n_before += n_characters
        return self.position

    def leave_out(self, n_characters: int) -> None:
        """Notes that `n_characters` characters of the answer will not arrive here. They follow
        after the text that has arrived so far."""
        self._gaps.append((self._n_before + len(self._text), n_characters))

    def end(self) -> None:
        """Notes that no more text comes."""
        self._is_over = True

    def take(self, n_characters: int) -> str:
        """Returns the next `n_characters` characters and moves past them. These characters must
        have arrived."""
        text = self._text[self._at : self._at + n_characters]
        self._at += n_characters
        if self._kept is not None:
            self._kept.append(text)
        return text

    def take_rest(self) -> str:
        """Returns all unread text that has arrived, and moves past it."""
        return self.take(len(self._text) - self._at)

    def keep(self) -> None:
        """Begins to record the text that is taken. `kept` returns the recorded text later."""
        self._kept = []

    def kept(self) -> str:
        """Returns the text that was taken since the call of `keep`, and stops recording."""
        text = "".join(self._kept or ())
        self._kept = None
        return text

    @property
    def is_empty(self) -> bool:
        """Whether all text that has arrived has been read."""
        return self._at == len(self._text)

    @property
    def is_read(self) -> bool:
        """Whether the text has ended and all of it has been read."""
        return self._is_over and self.is_empty

    def peek(self) -> Steps[str]:
        """Returns the next character without moving past it. Returns an empty text at the end of
        the text."""
        while self._at == len(self._text) and not self._is_over:
            yield
        return self._text[self._at : self._at + 1]

    def begins_with(self, start: str) -> Steps[bool]:
        """Returns whether the unread text begins with `start`."""
        while True:
            unread = self._text[self._at : self._at + len(start)]
            if unread == start:
                return True
            if self._is_over or not start.startswith(unread):
                return False
            yield

    def skip(self, marker: str) -> Steps[None]:
        """Moves past a marker if the unread text begins with it. If the whole text ends with only
        the beginning of the marker, moves past that beginning."""
        if (yield from self.begins_with(marker)):
            self.take(len(marker))
        elif marker.startswith(self._text[self._at :]):
            self.take_rest()

    def comes_next(self, *markers: str) -> Steps[bool]:
        """Returns whether the unread text begins with one of the markers."""
        for marker in markers:
            if (yield from self.begins_with(marker)):
                return True
        return False

    def take_one(self, *markers: str) -> Steps[bool]:
        """If the unread text begins with one of the markers, moves past that marker and returns
        True. Otherwise returns False. But if no more text will come, and the unread text is only
        the beginning of a marker, moves past it before returning False."""
        for marker in markers:
            if (yield from self.begins_with(marker)):
                self.take(len(marker))
                return True
        yield from self.skip_cut(*markers)
        return False

    def skip_cut(self, *markers: str) -> Steps[None]:
        """If the rest of the text is only the beginning of one of the markers, and no more text
        will come, moves past that rest."""
        for marker in markers:
            is_next = yield from self.begins_with(marker)
            if not is_next and marker.startswith(self._text[self._at :]):
                self.take_rest()

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Moves past the next characters that all match `characters`, and returns them.
        `characters` must be the pattern of a single character with a quantifier, such as
        `[a-z]*`."""
        pieces = []
        while (yield from self.peek()):
            match = characters.match(self._text, self._at)
            if match is None:
                break
            pieces.append(self.take(len(match[0])))
            if self._at < len(self._text):
                break
        return "".join(pieces)

    def until(
        self,
        markers: str | tuple[str, ...],
        pass_on: Callable[[str], None],
        pass_on_cut: Callable[[str], None] | None = None,
    ) -> Steps[str]:
        """Calls `pass_on` with the text before the next marker, and returns this marker. Returns an
        empty text if the text ends without a marker. If the text ends with the beginning of a
        marker, this beginning is passed to `pass_on_cut` or, if that is None, to `pass_on`.

        No marker may be the beginning of another marker.
        """
        search = _marker_in(markers if isinstance(markers, tuple) else (markers,)).search
        while True:
            found = search(self._text, self._at)
            pass_on(self.take((found.start() if found else len(self._text)) - self._at))
            if found and found[1]:
                return found[1]
            if self._is_over:
                (pass_on_cut or pass_on)(self.take_rest())
                return ""
            yield

    def rest(self, pass_on: Callable[[str], None]) -> Steps[None]:
        """Calls `pass_on` with all text up to the end, as the text arrives."""
        while (yield from self.peek()):
            pass_on(self.take_rest())

    def json_value(self, pass_on: Callable[[str], None]) -> Steps[bool]:
        """Calls `pass_on` with the text of a JSON object, list or string as it comes. Returns False
        if the text ends inside the value. Only brackets, strings and comments are checked. Strings
        may also have single quotes."""
        depth, before, quote = 0, ":", ""
        while (yield from self.peek()):
            match = (_IN_STRING[quote] if quote else _OUTSIDE).match(self._text, self._at)
            if match is None:  # the last character that has arrived is a backslash
                if self._is_over:
                    break
                yield
                continue
            part = self.take(len(match[0]))
            pass_on(part)
            if quote:
                if part != quote:
                    continue
                if quote == "'" and (yield from self.peek()) not in _AFTER_STRING:
                    continue
                quote = ""
            elif part == '"' or (part == "'" and before in _BEFORE_STRING):
                quote = part
            elif part in ("/", "#"):
                yield from self._comment(part, pass_on)
                continue
            else:
                depth += (part in ("{", "[")) - (part in ("}", "]"))
            before = part.rstrip()[-1:] or before
            if depth == 0 and not quote:
                return True
        pass_on(self.take_rest())
        return False

    def _comment(self, first: str, pass_on: Callable[[str], None]) -> Steps[None]:
        """If a comment begins with `first`, the character that was read last, calls `pass_on` with
        the rest of the comment."""
        follows = yield from self.peek()
        if first == "#" or follows == "/":
            pass_on((yield from self.run(_NOT_NEWLINE)))
        elif follows == "*":
            pass_on(self.take(1))
            if (yield from self.until("*/", pass_on)):
                pass_on(self.take(2))


@lru_cache(maxsize=64)
def _marker_in(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that finds one of the markers, or the beginning of a marker at the end of a
    text. The first group of the pattern matches only a whole marker."""
    whole = "|".join(map(re.escape, markers))
    begun = {marker[:n] for marker in markers for n in range(1, len(marker))}
    cut = "|".join(map(re.escape, sorted(begun, key=len, reverse=True)))
    return re.compile(rf"({whole})|(?:{cut})\Z" if cut else f"({whole})")


@lru_cache(maxsize=64)
def may_begin(markers: tuple[str, ...]) -> Callable[[str], object]:
    """Returns a function that tells whether a marker may begin in a text. The function returns a
    true value if the text contains the first character of a marker."""
    characters = {marker[0] for marker in markers}
    return re.compile(f"[{''.join(map(re.escape, sorted(characters)))}]").search
