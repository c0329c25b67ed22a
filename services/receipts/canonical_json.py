"""Canonical JSON (RFC 8785) of receipts, written fast.

`rfc8785` writes each number by itself, which takes about a microsecond, while the event loop waits.
Lists of tokens, which are nearly all of a receipt, are therefore written at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import rfc8785

MAX_WHOLE = 2**53 - 1
"""Largest whole number in canonical JSON."""


def canonical_json(value: Any) -> bytes:
    """Returns the same bytes as `rfc8785.dumps`. Raises ValueError if the value has no canonical
    form."""
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        members = [rfc8785.dumps(name) + b":" + canonical_json(value[name]) for name in names]
        return b"{" + b",".join(members) + b"}"
    if isinstance(value, list | tuple) and _are_whole(value):
        return repr(list(value)).replace(" ", "").encode()
    return rfc8785.dumps(value)


def _are_whole(values: Sequence[int]) -> bool:
    """Returns whether all values are whole numbers that canonical JSON can have."""
    if set(map(type, values)) != {int}:
        return False
    return min(values) >= -MAX_WHOLE and max(values) <= MAX_WHOLE
