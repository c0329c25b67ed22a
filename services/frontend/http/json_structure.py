"""How much structure a JSON body may have, counted before it is parsed.

A text of 8 MB is read in some milliseconds; as many bytes of `[],[],[]` hold the event loop for
seconds and take 25 times their size. So what is counted is what costs: containers, strings (names
are such too), and values. Only large bodies are looked at, and by means that run at the speed of
memory; a text that is full of commas and brackets takes a second, exact look without its strings.
"""

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals

FREE_BYTES = 64 * 2**10
"""Bytes of a body that may have any structure."""

MAX_CONTAINERS = 2**14
"""Objects and arrays of a body at most: as many turns as a conversation may have, of six parts."""

MAX_STRINGS = 2**15
"""Strings of a body at most, names of fields included."""

MAX_VALUES = 2**20
"""Values of a body at most: a million tokens."""


def check_structure(data: bytes, refusals: Refusals) -> None:
    """Raises TooLarge if a body has more structure than any may have."""
    if len(data) <= FREE_BYTES or not _excess(data):
        return
    # Without escapes every quote begins or ends a string. Backslashes are in strings only.
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    excess = f"{MAX_STRINGS} strings" if bare.count(b'"') > 2 * MAX_STRINGS else ""
    if excess := excess or _excess(b"".join(bare.split(b'"')[::2])):
        refusals[Refusal.BODY_TOO_LARGE] += 1
        raise errors.TooLarge("body", f"must not have more than {excess}")


def _excess(data: bytes) -> str:
    """Returns the limit that is exceeded, if what could be structure is."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} objects and arrays"
    if data.count(b",") >= MAX_VALUES:
        return f"{MAX_VALUES} values"
    return f"{MAX_STRINGS} strings" if data.count(b'"') > 2 * MAX_STRINGS else ""
