"""Translates regular expressions of schemas (ECMA-262) to the grammar engine's syntax, which is
Rust's.

The two syntaxes differ in a few places. The engine has no look-around, no word boundaries and no
back-references, and allows anchors only at the ends of a text. An expression that needs more is not
enforced. An expression is first read into a tree, and then written from the tree.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_LENGTH = 4096
"""Largest number of characters of an expression that is enforced."""

MAX_DEPTH = 32
"""Largest depth of nested groups in an expression that is enforced."""

MAX_REPEATED = 10_000
"""Largest product of the numbers of repetitions of nested groups. More repetitions would take long
to compile."""

_COUNT = re.compile(r"\{(\d{1,6})(?:(,)(\d{0,6}))?\}")
_CODE = re.compile(r"u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]{1,40}(?:=[A-Za-z_]{1,40})?\}")
_GROUP = re.compile(r"\?:|\?<[A-Za-z_$][\w$]*>")
_PLAIN = re.compile(r"[\w ]")

_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}"
_SPACE += r"\x{202f}\x{205f}\x{3000}\x{feff}"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_ANY = r"[^\n\r\x{2028}\x{2029}]"


class NotEnforceable(Exception):
    """Raised if the engine cannot enforce a part of the expression, or if the expression is not
    valid in ECMA-262."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A part of an expression that has no anchors and no groups, in the engine's syntax."""

    text: str


@dataclass(frozen=True, slots=True)
class _Anchor:
    sign: str


@dataclass(frozen=True, slots=True)
class _Group:
    alternatives: list[list["_Node"]]


@dataclass(frozen=True, slots=True)
class _Repeated:
    node: "_Node"
    count: str
    n_times: int


_Node = _Text | _Anchor | _Group | _Repeated


def enforceable(pattern: str) -> str | None:
    """Returns a regular expression translated to the engine's syntax. Returns None if the engine
    cannot enforce the expression."""
    if len(pattern) > MAX_LENGTH:
        return None
    try:
        return _written(_Reader(pattern).whole(), begins=True, ends=True, n_left=MAX_REPEATED)
    except NotEnforceable:
        return None


def literal_start(pattern: str) -> str:
    """Returns the literal characters after `^` at the beginning of a pattern: every text that
    matches the pattern begins with them. The result is empty if the pattern does not begin with
    `^`, or may match texts with different beginnings."""
    found = re.match(r"\^([\w-]*)(?![*+?{|\w-])", pattern)
    return found[1] if found and "|" not in pattern else ""


class _Reader:
    """Parses a regular expression (ECMA-262) from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> list[list[_Node]]:
        alternatives = self._alternatives()
        if self._at < len(self._pattern):  # a bracket that closes nothing
            raise NotEnforceable
        return alternatives

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        sign = self._peek()
        if not sign:
            raise NotEnforceable
        self._at += 1
        return sign

    def _taken(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._pattern, self._at)
        if found:
            self._at = found.end()
        return found

    def _alternatives(self) -> list[list[_Node]]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotEnforceable
        alternatives = [list(self._sequence())]
        while self._peek() == "|":
            self._at += 1
            alternatives.append(list(self._sequence()))
        self._depth -= 1
        return alternatives

    def _sequence(self) -> Iterator[_Node]:
        while (sign := self._peek()) and sign not in "|)":
            node = self._node(self._next())
            repeated = self._count()
            if repeated is None:
                yield node
            elif isinstance(node, _Anchor):
                raise NotEnforceable
            else:
                yield _Repeated(node, *repeated)

    def _node(self, sign: str) -> _Node:
        match sign:
            case "^" | "$":
                return _Anchor(sign)
            case "(":
                return self._group()
            case ".":
                return _Text(_ANY)
            case "[":
                return _Text(self._class())
            case "\\":
                return _Text(self._escaped(in_class=False))
            case "*" | "+" | "?":
                raise NotEnforceable
        return _Text(_literal(sign))

    def _group(self) -> _Group:
        if self._peek() == "?" and not self._taken(_GROUP):  # looks around, or sets a flag
            raise NotEnforceable
        alternatives = self._alternatives()
        if self._next() != ")":
            raise NotEnforceable
        return _Group(alternatives)

    def _count(self) -> tuple[str, int] | None:
        """Reads a quantifier such as `*` or `{2,5}`, if there is one. Returns the text of the
        quantifier, and how many copies of the repeated part the engine makes for it."""
        found: tuple[str, int] | None = None
        if (sign := self._peek()) and sign in "*+?":
            self._at += 1
            found = (sign, 1)
        elif counted := self._taken(_COUNT):
            low, high = int(counted[1]), int(counted[3] or counted[1])
            if high < low:
                raise NotEnforceable
            found = (counted[0], max(1, high))
        if found and self._peek() == "?":  # the same texts match lazily
            self._at += 1
        return found

    def _class(self) -> str:
        is_negated = self._peek() == "^"
        self._at += is_negated
        items: list[str] = []
        while (sign := self._next()) != "]":
            item = self._escaped(in_class=True) if sign == "\\" else _literal(sign)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                sign = self._next()
                high = self._escaped(in_class=True) if sign == "\\" else _literal(sign)
                if item.startswith("[") or high.startswith("["):  # ends of ranges are characters
                    raise NotEnforceable
                item = f"{item}-{high}"
            items.append(item)
        if not items:
            return r"[\x{0}-\x{10ffff}]" if is_negated else r"[^\x{0}-\x{10ffff}]"
        return f"[{'^' if is_negated else ''}{''.join(items)}]"

    def _escaped(self, *, in_class: bool) -> str:
        if found := self._taken(_PROPERTY):
            return f"[\\{found[0]}]"
        if found := self._taken(_CODE):
            return _literal(_character(int(found[1] or found[2] or found[3], 16)))
        sign = self._next()
        if (members := _CLASSES.get(sign.lower())) is not None:
            return f"[{'^' if sign.isupper() else ''}{members}]"
        if sign == "b" and in_class:
            return _literal("\b")
        if sign == "c" and (letter := self._next()).isascii() and letter.isalpha():
            return _literal(chr(ord(letter) % 32))
        if sign in _CONTROLS and not (sign == "0" and self._peek().isdigit()):
            return _literal(_CONTROLS[sign])
        if sign.isalnum():  # a word boundary, a back-reference, or an unknown escape
            raise NotEnforceable
        return _literal(sign)


def _written(alternatives: list[list[_Node]], *, begins: bool, ends: bool, n_left: int) -> str:
    """Writes parsed alternatives as a regular expression in the grammar engine's syntax, and
    returns the expression.

    `begins` says whether the alternatives stand at the beginning of the whole expression, where `^`
    is allowed, and `ends` whether they stand at its end, where `$` is allowed. `n_left` is a limit:
    where repetitions are nested, the product of their counts may be at most `n_left`.

    Raises:
        NotEnforceable: an anchor stands in another position, or the limit is exceeded.
    """
    return "|".join(
        "".join(
            _node_text(
                node,
                begins=begins and not place,
                ends=ends and place == len(sequence) - 1,
                n_left=n_left,
            )
            for place, node in enumerate(sequence)
        )
        for sequence in alternatives
    )


def _node_text(node: _Node, *, begins: bool, ends: bool, n_left: int) -> str:
    match node:
        case _Text(text):
            return text
        case _Anchor(sign):
            if not (begins if sign == "^" else ends):
                raise NotEnforceable
            return sign
        case _Group(alternatives):
            return f"(?:{_written(alternatives, begins=begins, ends=ends, n_left=n_left)})"
        case _Repeated(inner, count, n_times):
            if n_times > n_left:
                raise NotEnforceable
            text = _node_text(inner, begins=False, ends=False, n_left=n_left // n_times)
            return text + count


def _character(code: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:  # half of a character
        raise NotEnforceable
    return chr(code)


def _literal(sign: str) -> str:
    if _PLAIN.match(sign):
        return sign
    return f"\\x{{{ord(sign):x}}}"
