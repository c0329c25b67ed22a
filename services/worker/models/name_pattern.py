"""Regular expressions of a checkpoint that select modules by their names, matched in bounded time.

Python's own matcher tries all ways to match one after the other. `(a*)*b` has so many ways that
loading would never end. So Python's matcher is used only for expressions with few ways, such as
`.*mlp.gate$`. For other expressions, this module computes, for each part of the expression and each
position of a name, the positions at which a match of the part may end. The work is at most the size
of the expression times the square of the length of the name. A set of positions is an integer, in
which each bit stands for a position.

Python's parser reads the expressions, so they mean the same as in `re.match`. Some constructs
cannot be matched in this way, because they depend on how a part was matched: references to groups,
atomic groups and possessive repeats. They are refused, and the error names the construct. Flags are
refused, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

# The parser has no public name. An expression is a list of pairs of an operator and its arguments.
parser: Any = import_module("re._parser")

_MAX_TIMES = 1000
"""Largest bound of a repeat that is accepted, such as 1000 in `{2,1000}`. No module's name is
longer than this."""

_LONG = 64
"""Number of ways in which an open repeat such as `.*` is assumed to match a part of a module's
name. It is about the length of a name."""

_MAX_WAYS = _LONG**3
"""Largest number of ways to match an expression with which Python's matcher is used. Trying this
many ways takes a millisecond."""

_ANY_NUMBER = int(parser.MAXREPEAT)  # of an open end, as in `{2,}`

_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda c: c.isalnum() or c == "_",
    "LINEBREAK": lambda c: c == "\n",
}


class NamePattern:
    """A regular expression, matched at the beginning of a name as `re.match` does."""

    def __init__(self, expression: str) -> None:
        """Raises ValueError if the expression is invalid, or has a part that is not supported."""
        try:
            parsed = parser.parse(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{expression[:80]!r} is no regular expression: {error}") from error
        if parsed.state.flags & ~re.UNICODE.value:
            raise ValueError(f"{expression[:80]!r} sets flags, which is not supported")
        self._parsed = parsed
        for name in _unsupported(parsed):
            raise ValueError(f"{expression[:80]!r} has {name}, which is not supported")
        self._quick = re.compile(expression) if _ways(parsed) <= _MAX_WAYS else None

    def matches(self, name: str) -> bool:
        """Returns whether the expression matches from the beginning of `name`."""
        if self._quick is not None and len(name) <= 2 * _LONG:
            return self._quick.match(name) is not None
        return bool(_Subject(name).ends(self._parsed, 1))


class _Subject:
    """A name that is matched with an expression.

    Methods take and return sets of positions in the name. A set is an integer whose bit i is 1 if
    position i belongs to the set.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[tuple[int, int], int] = {}

    def ends(self, parts: Any, starts: int) -> int:
        """Returns all positions at which a match of `parts`, one after the other, may end if the
        match begins at a position in `starts`."""
        for part in parts:
            found = 0
            for start in _bits(starts):
                found |= self._ends_of(part, start)
            starts = found
            if not starts:
                break
        return starts

    def _ends_of(self, part: Any, start: int) -> int:
        key = id(part), start
        if key not in self._known:
            self._known[key] = self._find_ends(part, start)
        return self._known[key]

    def _find_ends(self, part: Any, start: int) -> int:
        operator, arguments = part
        here = 1 << start
        match str(operator):
            case "SUBPATTERN":
                return self.ends(arguments[3], here)
            case "BRANCH":
                found = 0
                for branch in arguments[1]:
                    found |= self.ends(branch, here)
                return found
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeated(arguments, here)
            case "ASSERT" | "ASSERT_NOT" as kind:
                is_there = bool(self.ends(arguments[1], here))
                return here if is_there == (kind == "ASSERT") else 0
            case "AT":
                return here if self._is_at(str(arguments), start) else 0
            case kind:
                fits = start < len(self._name) and _fits(kind, arguments, self._name[start])
                return here << 1 if fits else 0

    def _repeated(self, arguments: Any, starts: int) -> int:
        """Returns the set of positions at which a match of a repeat may end, if it begins at a
        position in `starts`. `arguments` are the least number of repetitions, the largest number,
        and the repeated parts. Bit i of a set stands for position i."""
        least, most, parts = arguments
        for _ in range(least):
            starts, before = self.ends(parts, starts), starts
            if starts == before:
                break  # and stays so
        found = fresh = starts
        for _ in range(min(most - least, len(self._name) + 1)):
            fresh = self.ends(parts, fresh) & ~found
            if not fresh:
                break
            found |= fresh
        return found

    def _is_at(self, place: str, position: int) -> bool:
        name, end = self._name, len(self._name)
        match place:
            case "AT_BEGINNING" | "AT_BEGINNING_STRING":
                return position == 0
            case "AT_END":
                return position == end or name[position:] == "\n"
            case "AT_END_STRING":
                return position == end
        is_word = _CATEGORIES["WORD"]
        before = position > 0 and is_word(name[position - 1])
        after = position < end and is_word(name[position])
        return (before != after) == (place == "AT_BOUNDARY")


def _bits(positions: int) -> Iterator[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest


def _fits(kind: str, arguments: Any, character: str) -> bool:
    """Returns whether an expression for one character fits a character."""
    match kind:
        case "LITERAL":
            return ord(character) == int(arguments)
        case "NOT_LITERAL":
            return ord(character) != int(arguments)
        case "ANY":
            return character != "\n"
        case "RANGE":
            return int(arguments[0]) <= ord(character) <= int(arguments[1])
        case "CATEGORY":
            name = str(arguments).removeprefix("CATEGORY_")
            is_meant = _CATEGORIES[name.removeprefix("NOT_")](character)
            return is_meant != name.startswith("NOT_")
    is_negated = bool(arguments) and str(arguments[0][0]) == "NEGATE"
    items = arguments[1:] if is_negated else arguments
    return any(_fits(str(item), said, character) for item, said in items) != is_negated


_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_ASSERTIONS = ("ASSERT", "ASSERT_NOT")
_SUPPORTED = frozenset((
    "LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "BRANCH", "SUBPATTERN", *_REPEATS, *_ASSERTIONS,
))  # fmt: skip


def _unsupported(parts: Any) -> Iterator[str]:
    """Yields the names of those parts of an expression that are not supported."""
    for operator, arguments in parts:
        kind = str(operator)
        if kind not in _SUPPORTED:
            yield kind.lower()
            continue
        # `fnmatch.translate` lets `.` match line breaks, which no name has.
        if kind == "SUBPATTERN" and (arguments[1] & ~re.DOTALL.value or arguments[2]):
            yield "flags"
        elif kind in _REPEATS and not _is_short(*arguments[:2]):
            yield f"a repeat of more than {_MAX_TIMES} times"
        elif kind in _ASSERTIONS and arguments[0] < 0:
            yield "a look behind"
        for inner in _inside(kind, arguments):
            yield from _unsupported(inner)


def _is_short(least: int, most: int) -> bool:
    return least <= _MAX_TIMES and (most <= _MAX_TIMES or most == _ANY_NUMBER)


def _inside(kind: str, arguments: Any) -> list[Any]:
    """Returns the expressions that a part of an expression contains: the branches of an
    alternative, or the one expression of a group, a repeat or an assertion. `kind` and `arguments`
    are the part as Python's parser of regular expressions returns it."""
    if kind == "BRANCH":
        return list(arguments[1])
    return [arguments[-1]] if kind in ("SUBPATTERN", *_REPEATS, *_ASSERTIONS) else []


def _ways(parts: Any) -> float:
    """Returns an estimate of the number of ways to match `parts`. The result is infinite if a
    repeated part can itself match in several ways, as in `(a*)*`."""
    ways = 1.0
    for operator, arguments in parts:
        match str(operator):
            case "SUBPATTERN":
                ways *= _ways(arguments[3])
            case "BRANCH":
                ways *= sum(_ways(branch) for branch in arguments[1])
            case "ASSERT" | "ASSERT_NOT":
                ways *= 1 + _ways(arguments[1])
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, repeated = arguments
                within = _ways(repeated)
                if within > 1:
                    ways *= 1 + within if most == 1 else math.inf
                else:
                    ways *= min(most - least + 1, _LONG)
    return ways
