"""Stop strings: texts that end the output. They are found while the output is still coming.

Each stop string has its own Knuth-Morris-Pratt automaton, so the cost of a character does not
depend on how the text is cut into tokens. Only the longest end of the text that may be the
beginning of a stop string is held back.
"""

import functools
from collections.abc import Iterable


class StopStrings:
    """Cuts a text before the stop string that is complete first. If several stop strings are
    complete at the same character, cuts before the longest of them. With `are_shown`, cuts after
    the stop string instead."""

    def __init__(self, stops: Iterable[str], *, are_shown: bool = False) -> None:
        self._are_shown = are_shown
        self._matches = [_Match(stop) for stop in stops]
        self._held = ""
        self.is_empty = not self._matches
        """Whether there are no stop strings. Text is then delivered as it comes."""
        self.is_met = False
        self.met = ""
        """Stop string that was found; empty before a stop string is found."""

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Takes more text, and returns the text that can be delivered. Call it only while no stop
        string has been found. While `may_end` is false, a complete stop string counts as ordinary
        text."""
        if not self._matches:
            return text
        n_read = len(self._held)
        self._held += text
        for character in text:
            n_read += 1
            n_matched = max(match.advance(character) for match in self._matches)
            if n_matched and may_end:
                self.is_met = True
                self.met = self._held[n_read - n_matched : n_read]
                return self._deliver(n_read - (0 if self._are_shown else n_matched))
        return self._deliver(len(self._held) - max(m.n_characters for m in self._matches))

    def flush(self) -> str:
        """Ends the text, and returns the part that was held back. The result is empty if a stop
        string was found."""
        return "" if self.is_met else self._held

    def _deliver(self, n_characters: int) -> str:
        text, self._held = self._held[:n_characters], self._held[n_characters:]
        return text


class _Match:
    """The state of the search for one stop string: the length of the longest proper prefix of the
    stop string with which the text ends."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.n_characters = 0

    def advance(self, character: str) -> int:
        """Reads a character. Returns the length of the stop string if it is now complete, else
        0."""
        n = self.n_characters
        while n and self._stop[n] != character:
            n = self._borders[n - 1]
        if self._stop[n] == character:
            n += 1
        if n < len(self._stop):
            self.n_characters = n
            return 0
        self.n_characters = self._borders[n - 1]
        return n


@functools.lru_cache(maxsize=256)
def _borders(pattern: str) -> tuple[int, ...]:
    """Returns, for each prefix of `pattern`, the length of its longest border: the longest text,
    shorter than the prefix, with which the prefix both begins and ends."""
    borders = [0] * len(pattern)
    n = 0
    for end in range(1, len(pattern)):
        while n and pattern[n] != pattern[end]:
            n = borders[n - 1]
        if pattern[n] == pattern[end]:
            n += 1
        borders[end] = n
    return tuple(borders)
