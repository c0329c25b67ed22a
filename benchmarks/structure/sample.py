"""Random docstrings, for a reader who marks the docstrings that must be read twice."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.structure.tree import Tree, docstrings, parse, under

FOLDERS = ("services", "kernels", "simulator", "benchmarks")


class Drawn(NamedTuple):
    """A docstring, the place where it stands, and the definition that it describes."""

    path: str
    line: int
    text: str
    definition: str


def sample(tree: Tree, n: int, *, seed: int) -> list[Drawn]:
    """Returns `n` docstrings of the folders `FOLDERS`, or all if there are fewer, by place.

    The same tree and seed give the same docstrings.
    """
    found = [
        Drawn(path, docstring.first_line, docstring.text, docstring.definition)
        for path, source in sorted(under(tree, FOLDERS, ".py").items())
        for docstring in docstrings(parse(source))
    ]
    return sorted(Random(seed).sample(found, min(n, len(found))))


def listed(drawn: Sequence[Drawn]) -> str:
    """Returns docstrings below their definitions, as a list to mark."""
    return "\n\n".join(
        "\n".join(filter(None, (f"[ ] {number}. {path}:{line}", definition, text)))
        for number, (path, line, text, definition) in enumerate(drawn, start=1)
    )
