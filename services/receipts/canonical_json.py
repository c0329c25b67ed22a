"""Canonical JSON (RFC 8785) of receipts, written fast.

`rfc8785` writes each number separately, which takes about a microsecond per number and blocks the
event loop. A receipt consists almost entirely of lists of tokens. Therefore this module writes each
list of whole numbers at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import rfc8785

MAX_WHOLE = 2**53 - 1
"""Largest whole number in canonical JSON."""


def canonical_json(value: Any) -> bytes:
    """Returns a value as canonical JSON: the same bytes as `rfc8785.dumps` returns. Raises
    ValueError if the value has no canonical form."""
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        members = [rfc8785.dumps(name) + b":" + canonical_json(value[name]) for name in names]
        return b"{" + b",".join(members) + b"}"
    if isinstance(value, list | tuple) and _are_whole(value):
        return repr(list(value)).replace(" ", "").encode()
    return rfc8785.dumps(value)


def _are_whole(values: Sequence[int]) -> bool:
    """Returns whether `values` are not empty, and are all whole numbers within the range of
    canonical JSON."""
    if set(map(type, values)) != {int}:
        return False
    return min(values) >= -MAX_WHOLE and max(values) <= MAX_WHOLE
