"""Random docstrings, for a reader who marks the docstrings that must be read twice."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.structure.tree import Tree, docstrings, parse, under

FOLDERS = ("services", "kernels")


class Drawn(NamedTuple):
    """A docstring and the place where it stands."""

    path: str
    line: int
    text: str


def sample(tree: Tree, n: int, *, seed: int) -> list[Drawn]:
    """Returns `n` docstrings of services and kernels, or all if there are fewer, by place.

    The same tree and seed give the same docstrings.
    """
    found = [
        Drawn(path, docstring.first_line, docstring.text)
        for path, source in sorted(under(tree, FOLDERS, ".py").items())
        for docstring in docstrings(parse(source))
    ]
    return sorted(Random(seed).sample(found, min(n, len(found))))


def listed(drawn: Sequence[Drawn]) -> str:
    """Returns docstrings as a list to mark."""
    return "\n\n".join(
        f"[ ] {number}. {path}:{line}\n{text}"
        for number, (path, line, text) in enumerate(drawn, start=1)
    )
