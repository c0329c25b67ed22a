"""JSON in the canonical form of RFC 8785: equal values have equal bytes, whatever wrote them.

A signature is made of these bytes. A program may parse a receipt and write it again, with other
spaces and another order of members, and the canonical form stays the same. Whole numbers must be
exact as doubles, since many readers of JSON have no other numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from json.encoder import encode_basestring
from math import isfinite

MAX_WHOLE = 2**53 - 1
"""Largest whole number that every reader of JSON keeps exactly."""

LARGEST_PLAIN = 21
"""Number of digits before the decimal point above which a number is written with an exponent."""


def canonical(value: object) -> bytes:
    """Returns a value as canonical JSON in UTF-8.

    Raises:
        ValueError: the value is not JSON, has a number that is not finite or a whole number that
        doubles do not hold exactly, or has a text that is not Unicode.
    """
    return _written(value).encode()


_NAMES: Mapping[bool | None, str] = {None: "null", True: "true", False: "false"}


def _written(value: object) -> str:
    match value:
        case str():
            return encode_basestring(value)
        case None | bool():
            return _NAMES[value]
        case int():
            return _whole(value)
        case float():
            return _number(value)
        case dict():
            return "{" + ",".join(_member(name, value[name]) for name in _ordered(value)) + "}"
        case list() | tuple():
            return "[" + ",".join(_items(value)) + "]"
    raise ValueError(f"{type(value).__name__} has no form in JSON")


def _ordered(value: Mapping[object, object]) -> list[str]:
    """Returns the names of an object's members, sorted by their UTF-16 code units."""
    names = [name for name in value if isinstance(name, str)]
    if len(names) < len(value):
        raise ValueError("the names of an object's members must be texts")
    if all(map(str.isascii, names)):
        return sorted(names)
    return sorted(names, key=lambda name: name.encode("utf-16-be", errors="surrogatepass"))


def _items(value: Sequence[object]) -> Iterable[str]:
    """Returns the items of a list, written. Lists of whole numbers, such as tokens, are long."""
    whole = [item for item in value if type(item) is int]
    if len(whole) < len(value) or not whole or max(max(whole), -min(whole)) > MAX_WHOLE:
        return map(_written, value)
    return map(str, whole)


def _member(name: str, value: object) -> str:
    return f"{encode_basestring(name)}:{_written(value)}"


def _whole(value: int) -> str:
    if abs(value) > MAX_WHOLE:
        raise ValueError(f"{value} is not exact as a double")
    return str(value)


def _number(value: float) -> str:
    """Returns a number as ECMAScript writes it: the fewest digits that stand for it alone."""
    if not isfinite(value):
        raise ValueError(f"{value} has no form in JSON")
    if value == 0:
        return "0"
    sign, places, exponent = Decimal(repr(value)).normalize().as_tuple()
    digits, point = "".join(map(str, places)), len(places) + int(exponent)
    return "-" * sign + _pointed(digits, point)


def _pointed(digits: str, point: int) -> str:
    """Returns the number 0.DIGITS times ten to the power of `point`."""
    n_digits = len(digits)
    if n_digits <= point <= LARGEST_PLAIN:
        return digits + "0" * (point - n_digits)
    if 0 < point <= LARGEST_PLAIN:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if n_digits > 1 else ""
    return f"{digits[0]}{fraction}e{point - 1:+d}"
