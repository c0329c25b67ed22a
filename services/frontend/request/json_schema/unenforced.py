"""A keyword of a schema that is not enforced, and the place of the keyword."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str, ...]
"""The names of the members that lead from the root of a schema to a part of the schema."""

MAX_HEADER_LENGTH = 1024
"""Largest number of characters of a list of keywords in a header."""

MAX_SHOWN = 120
"""Largest number of characters of a place in a message."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.$~/-]")


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that is not enforced, in the part of the schema at `path`."""

    path: Path
    keyword: str

    def __str__(self) -> str:
        place = ".".join(self.path)[:MAX_SHOWN] or "the root"
        return f"'{self.keyword}' at {place}"

    def name_in(self, field: str) -> str:
        """Returns the whole name of the keyword of a schema in the field `field`, for a header.
        Characters that may not be in a header are replaced."""
        return _NOT_IN_NAMES.sub("?", ".".join((field, *self.path, self.keyword)))


def header_of(names: Iterable[str]) -> str:
    """Returns names as a list for a header. If the list would be too long, its last item is `...`
    and stands for the names that are left out."""
    text = ""
    for name in dict.fromkeys(names):
        longer = f"{text}, {name}" if text else name
        if len(longer) > MAX_HEADER_LENGTH:
            return f"{text}, ..." if text else "..."
        text = longer
    return text
