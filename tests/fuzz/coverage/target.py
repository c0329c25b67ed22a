"""The interface of fuzzing targets, and helpers that turn bytes into inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser, and where its inputs begin."""

    run: Callable[[bytes], None]
    """Parses an input. Raises an undocumented error if the parser has a bug."""

    seeds: Sequence[bytes]
    """Inputs that are changed first."""

    words: Sequence[str] = ()
    """Words of the format, which are put in anywhere."""

    max_bytes: int = 4096
    """The longest input."""


def any_bytes(beginning: bytes = b"", *, n_seeds: int = 24) -> list[bytes]:
    """Returns seeds that make all kinds of decisions; `beginning` are the first ones."""
    return [beginning + Random(seed).randbytes(256) for seed in range(n_seeds)]


class Choices:
    """Reads decisions from the bytes of an input; when these are used up, all are the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether all bytes are used up."""
        return self._at >= len(self._data)

    def bytes(self, n: int) -> bytes:
        """Returns the next `n` bytes, or fewer if there are no more."""
        taken = self._data[self._at : self._at + n]
        self._at += n
        return taken

    def number(self, limit: int) -> int:
        """Returns a number from 0 to `limit` - 1."""
        n_bytes = (max(limit - 1, 1).bit_length() + 7) // 8
        return int.from_bytes(self.bytes(n_bytes)) % limit

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Returns one of `choices`."""
        return choices[self.number(len(choices))]

    def text(self) -> str:
        """Returns a short text of any characters, half of them surrogates included."""
        return self.bytes(self.number(24)).decode(errors="surrogateescape")

    def json(self, depth: int = 3) -> Json:
        """Returns any value that JSON has, absurd numbers among them."""
        kind = self.number(10 if depth else 8)
        if kind < 3:
            return self.one_of(_ODD_VALUES)
        if kind == 3:
            return self.number(2**16) - 2**8
        if kind == 4:
            return int.from_bytes(self.bytes(8), signed=True)
        if kind < 8:
            return self.text()
        values = [self.json(depth - 1) for _ in range(self.number(5))]
        return values if kind == 8 else {self.text(): value for value in values}

    def changed(self, value: Json, words: Sequence[str] = ()) -> Json:
        """Returns a JSON object with some of its fields changed, anew or gone."""
        changed = dict(value)
        for _ in range(1 + self.number(4)):
            names = (*changed, *words, "")
            name = self.one_of(names) or self.text()
            match self.number(6):
                case 0:
                    changed.pop(name, None)
                case 1:
                    changed[name] = self.one_of([*changed.values(), None])
                case 2 if isinstance(changed.get(name), dict):
                    changed[name] = self.changed(changed[name])
                case _:
                    changed[name] = self.json()
        return changed


_ODD_VALUES: Sequence[Json] = (
    None, True, False, 0, 1, -1, 2, 2**31 - 1, 2**31, 2**32, -(2**31), 2**63, -(2**63) - 1, 10**30,
    0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), "", "a", "\x00", "..", "[]",
    [], [[]], {}, {"": None}, [1, 2], ["a"], [None], 1e-320, "\ud800",
)  # fmt: skip
