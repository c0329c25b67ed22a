"""How much structure a JSON body may have, counted while it arrives.

A text of 8 MB is read in some milliseconds; as many bytes of `[],[],[]` hold the event loop for
seconds and take 25 times their size. So what is counted is what costs: containers, strings (names
are such too), and values. Each piece is counted as it comes, by means that run at the speed of
memory, so that a large body never holds the loop for long and one with too much is refused early.
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


class StructureCount:
    """The structure of one body so far."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._uncounted: list[bytes] = []  # while the body is small
        self._n_bytes = 0
        self._escape = b""  # a backslash at the end of the last piece
        self._is_in_string = False
        self._n_quotes = 0
        self._n_containers = 0
        self._n_commas = 0

    def add(self, piece: bytes) -> None:
        """Counts the next piece; raises TooLarge if the body has more structure than any may
        have."""
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
        # Without escapes every quote begins or ends a string. Backslashes are in strings only.
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
            return  # refused, before it is cut in so many parts
        outside = b"".join(bare.split(b'"')[self._is_in_string :: 2])
        self._is_in_string ^= n_quotes % 2 == 1
        self._n_containers += outside.count(b"[") + outside.count(b"{")
        self._n_commas += outside.count(b",")

    def _excess(self) -> str:
        """Returns the limit that is exceeded, if one is."""
        if self._n_quotes > 2 * MAX_STRINGS:
            return f"{MAX_STRINGS} strings"
        if self._n_containers > MAX_CONTAINERS:
            return f"{MAX_CONTAINERS} objects and arrays"
        return f"{MAX_VALUES} values" if self._n_commas >= MAX_VALUES else ""
