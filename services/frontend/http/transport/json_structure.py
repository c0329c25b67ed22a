"""Limits the structure of a JSON body: counts containers, strings and values while the body is
received.

A JSON text of 8 MB is parsed in some milliseconds, but 8 MB of `[],[],[]` would block the event
loop for seconds and take 25 times their size in memory. The parts that cost most are therefore
counted: containers, strings (including names of fields), and values. They are counted in each piece
of the body when it is received, by operations that run at the speed of memory. A large body never
blocks the event loop for long, and a body with too much structure is refused early.
"""

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals

FREE_BYTES = 64 * 2**10
"""Size in bytes up to which the structure of a body is not limited."""

MAX_CONTAINERS = 2**14
"""Largest number of objects and arrays in a body, enough for the largest number of turns of a
conversation with six parts in each turn."""

MAX_STRINGS = 2**16
"""Largest number of strings in a body, including names of fields; enough for the schemas of 200
tools with 2 KB each."""

MAX_VALUES = 2**20
"""Largest number of values in a body, enough for a million tokens."""


class StructureCount:
    """Counts the containers, strings and values in the received part of a body."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._uncounted: list[bytes] = []  # pieces of a body below FREE_BYTES
        self._n_bytes = 0
        self._escape = b""  # the backslash at the end of the last piece, if any
        self._is_in_string = False
        self._n_quotes = 0
        self._n_containers = 0
        self._n_commas = 0

    def add(self, piece: bytes) -> None:
        """Counts the next piece of the body. Raises TooLarge if the body has too much structure."""
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
        """Returns a description of the exceeded limit. Returns an empty text if no limit is
        exceeded."""
        if self._n_quotes > 2 * MAX_STRINGS:
            return f"{MAX_STRINGS} strings"
        if self._n_containers > MAX_CONTAINERS:
            return f"{MAX_CONTAINERS} objects and arrays"
        return f"{MAX_VALUES} values" if self._n_commas >= MAX_VALUES else ""
