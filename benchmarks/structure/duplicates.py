"""Duplicated code: equal runs of lines of code in two places.

Lines are compared without indentation. Imports and lines without a letter or digit, such as a
closing bracket, are left out: they neither begin nor lengthen a run.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from benchmarks.structure.tree import Tree, code_lines

MIN_LINES = 6
"""Smallest number of equal lines of code that count as duplicated."""

MAX_PLACES = 50
"""Largest number of places of a run of lines. A run with more places is an idiom of the language,
and is left out."""

_IMPORT = re.compile(r"(from .* import\b.*|import\b.*|#include\b.*)")
_SAYS_SOMETHING = re.compile(r"\w")


class Start(NamedTuple):
    """The beginning of a run of lines: a file, and an index into its compared lines."""

    path: str
    first: int


class Duplicate(NamedTuple):
    """Two places with equal lines of code, and the number of these lines."""

    first: str
    second: str
    n_lines: int


def duplicates(tree: Tree) -> list[Duplicate]:
    """Returns each pair of places that have at least `MIN_LINES` equal lines, the longest first."""
    numbered = {path: list(_compared(path, text)) for path, text in tree.items()}
    texts = {path: [line for _, line in lines] for path, lines in numbered.items()}
    found = [
        Duplicate(_spot(numbered, a), _spot(numbered, b), _length(texts, a, b))
        for places in _windows(texts).values()
        for a, b in combinations(places, 2)
        if not _is_continued(texts, a, b)
    ]
    return sorted(found, key=lambda pair: -pair.n_lines)


def _compared(path: str, text: str) -> Iterator[tuple[int, str]]:
    is_import = False
    for number, line in code_lines(path, text):
        is_import = is_import or _IMPORT.match(line) is not None
        if not is_import and _SAYS_SOMETHING.search(line):
            yield number, line
        if is_import and not _is_open(line):
            is_import = False


def _is_open(line: str) -> bool:
    """Returns whether the import statement in this line continues in the next line."""
    return line.endswith(("(", ",", "{"))


def _windows(texts: dict[str, list[str]]) -> dict[tuple[str, ...], list[Start]]:
    """Returns the places of each run of `MIN_LINES` lines that occurs in more than one place, but
    in at most `MAX_PLACES`."""
    windows: dict[tuple[str, ...], list[Start]] = defaultdict(list)
    for path, lines in texts.items():
        for index in range(len(lines) - MIN_LINES + 1):
            windows[tuple(lines[index : index + MIN_LINES])].append(Start(path, index))
    return {lines: at for lines, at in windows.items() if 1 < len(at) <= MAX_PLACES}


def _is_continued(texts: dict[str, list[str]], a: Start, b: Start) -> bool:
    """Returns whether the pair of places is part of a longer one, because the lines before both
    places are equal too, or whether the places overlap."""
    if a.path == b.path and b.first - a.first < MIN_LINES:
        return True
    is_inside = a.first > 0 and b.first > 0
    return is_inside and texts[a.path][a.first - 1] == texts[b.path][b.first - 1]


def _length(texts: dict[str, list[str]], a: Start, b: Start) -> int:
    ones, others = texts[a.path][a.first :], texts[b.path][b.first :]
    equal = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        equal += 1
    return equal


def _spot(numbered: Mapping[str, Sequence[tuple[int, str]]], start: Start) -> str:
    return f"{start.path}:{numbered[start.path][start.first][0]}"
