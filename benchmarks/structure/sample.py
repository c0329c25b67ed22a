"""Random docstrings, for a reader who marks those that must be read twice."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.structure.tree import Tree, docstrings, parse, under

FOLDERS = ("services", "kernels", "simulator", "benchmarks")


class Drawn(NamedTuple):
    """A docstring that was sampled, its file and line, and the definition that it describes."""

    path: str
    line: int
    text: str
    definition: str


def sample(tree: Tree, n: int, *, seed: int) -> list[Drawn]:
    """Returns `n` random docstrings of the folders `FOLDERS`, sorted by file and line. Returns all
    docstrings if there are fewer than `n`.

    The same tree and seed give the same docstrings.
    """
    found = [
        Drawn(path, docstring.first_line, docstring.text, docstring.definition)
        for path, source in sorted(under(tree, FOLDERS, ".py").items())
        for docstring in docstrings(parse(source))
    ]
    return sorted(Random(seed).sample(found, min(n, len(found))))


def listed(drawn: Sequence[Drawn]) -> str:
    """Returns a text for a reader to mark: each docstring with a checkbox, below its definition."""
    return "\n\n".join(
        "\n".join(filter(None, (f"[ ] {number}. {path}:{line}", definition, text)))
        for number, (path, line, text, definition) in enumerate(drawn, start=1)
    )
