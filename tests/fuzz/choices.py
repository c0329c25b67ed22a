"""Decisions that are read off bytes, one after the other.

hypothesis makes up the bytes, which costs it the same however much is built of them, and makes
them smaller when it has found something: fewer, and nearer to 0. So the first of several things
should be the simplest. When the bytes are used up, every decision is the first.
"""

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Item = TypeVar("Item")
Example = TypeVar("Example")

N_BYTES = 256

_WIDTHS = (8, 16, 32, 64)

_TEXTS = (
    "",
    "a",
    "hello",
    "\x00",
    "é€",
    "\u2028\u0085\ufeff",
    "\U0010ffff\U0001f40b",
    "a" * 300,
    "{{ 7 * 7 }}",
    "{% for x in range(10) %}x{% endfor %}",
    "../../etc/passwd",
    "%s%n",
    "\r\nx: y",
    "<|im_end|>",
    "0",
    "-1",
    "18446744073709551616",
)


class Choices:
    """Decisions, from the first byte to the last."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, n_bytes: int) -> bytes:
        """Returns the next bytes, zeros after the last."""
        data = self._data[self._at : self._at + n_bytes]
        self._at += n_bytes
        return data.ljust(n_bytes, b"\0")

    def below(self, n: int) -> int:
        """Returns a number from 0 to n - 1."""
        return int.from_bytes(self.take(1 if n <= 256 else 2)) % n

    def one_in(self, n: int) -> bool:
        """Returns true once in n times, and false for a 0."""
        return self.below(n) == n - 1

    def one_of(self, items: Sequence[Item]) -> Item:
        """Returns one of the items."""
        return items[self.below(len(items))]

    def several(self, n_most: int, make: Callable[[], Item]) -> list[Item]:
        """Returns so many new items at most."""
        return [make() for _ in range(self.below(n_most + 1))]

    def whole_number(self, low: int, high: int) -> int:
        """Returns a number of a range: small, near one of its ends, or any."""
        kind = self.below(4)
        if kind == 0:
            return max(low, min(high, self.below(256)))
        if kind == 1:
            return low + self.below(min(3, high - low + 1))
        if kind == 2:
            return high - self.below(min(3, high - low + 1))
        width = self.one_of(_WIDTHS)
        return low + int.from_bytes(self.take(width // 8)) % (high - low + 1)

    def number(self) -> float:
        """Returns any number of 32 bits: small, 0, not finite, or any pattern of bits."""
        kind = self.below(3)
        if kind == 0:
            return self.below(256) / 64
        if kind == 1:
            return self.one_of((0.0, -0.0, 1.0, -2.0, 1e-45, 3.4e38, float("inf"), float("nan")))
        value: float = struct.unpack("<f", self.take(4))[0]
        return value

    def text(self, n_most: int = 12) -> str:
        """Returns a text that is likely to reveal bugs, or any other text."""
        if self.below(2):
            return self.one_of(_TEXTS)
        return self.take(self.below(n_most + 1)).decode(errors="replace")


def examples(make: Callable[[Choices], Example]) -> SearchStrategy[Example]:
    """Returns a strategy whose examples `make` builds from random choices."""
    return st.binary(min_size=N_BYTES, max_size=N_BYTES).map(lambda data: make(Choices(data)))
