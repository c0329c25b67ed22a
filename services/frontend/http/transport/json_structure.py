"""Limits the structure of a JSON body, which is counted while the body arrives.

A text of 8 MB is read in some milliseconds; as many bytes of `[],[],[]` would hold the event loop
for seconds and take 25 times their size in memory. So the parts that cost most are counted:
containers, strings, which include names of fields, and values. Each piece is counted as it comes,
by operations that run at the speed of memory, so that a large body never holds the loop for long,
and a body with too much structure is refused early.
"""

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals

FREE_BYTES = 64 * 2**10
"""Largest size, in bytes, of a body that may have any structure."""

MAX_CONTAINERS = 2**14
"""Largest number of objects and arrays in a body: as many turns as a conversation may have, of six
parts each."""

MAX_STRINGS = 2**15
"""Largest number of strings in a body, including names of fields."""

MAX_VALUES = 2**20
"""Largest number of values in a body: a million tokens."""


class StructureCount:
    """The structure of the part of a body that has come."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._uncounted: list[bytes] = []  # pieces of a body that is still small
        self._n_bytes = 0
        self._escape = b""  # the backslash at the end of the last piece, if any
        self._is_in_string = False
        self._n_quotes = 0
        self._n_containers = 0
        self._n_commas = 0

    def add(self, piece: bytes) -> None:
        """Counts the next piece; raises TooLarge if the body has too much structure."""
        self._n_bytes += len(piece)
        self._uncounted.append(piece)
        if self._n_bytes <= FREE_BYTES:
            return
        for uncounted in self._uncounted:
            self._count(uncounted)
        self._uncounted.clear()
        if excess := self._excess():
            self._refusals[Refusal.BODY_TOO_LARGE] += 1
            raise errors.TooLarge("body", f"must not have more than {excess}")

    def _count(self, piece: bytes) -> None:
        # Without escapes, every quote begins or ends a string. Only strings have backslashes.
        bare = self._escape + piece
        self._escape = b""
        if b"\\" in bare:
            bare = bare.replace(rb"\\", b"")
            if bare.endswith(b"\\"):
                bare, self._escape = bare[:-1], b"\\"
            bare = bare.replace(rb"\"", b"")
        n_quotes = bare.count(b'"')
        self._n_quotes += n_quotes
        if self._n_quotes > 2 * MAX_STRINGS:
            return  # too many, and costly to split
        outside = b"".join(bare.split(b'"')[self._is_in_string :: 2])
        self._is_in_string ^= n_quotes % 2 == 1
        self._n_containers += outside.count(b"[") + outside.count(b"{")
        self._n_commas += outside.count(b",")

    def _excess(self) -> str:
        """Returns the limit that is exceeded, in words; empty if none is."""
        if self._n_quotes > 2 * MAX_STRINGS:
            return f"{MAX_STRINGS} strings"
        if self._n_containers > MAX_CONTAINERS:
            return f"{MAX_CONTAINERS} objects and arrays"
        return f"{MAX_VALUES} values" if self._n_commas >= MAX_VALUES else ""
