"""A keyword of a schema that is not enforced, and the place of the keyword."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]
"""Type of a path in a schema: the names of the members that lead from the root to a part."""

MAX_HEADER_LENGTH = 1024
"""Largest number of characters in the header of an HTTP response that lists the keywords that are
not enforced."""

SEPARATOR = ", "
"""Separator of the keywords' names in the header that lists the keywords that are not enforced."""

MAX_SHOWN = 120
"""Largest number of characters of a path that a message shows."""

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
        """Returns the name under which an HTTP header lists the keyword. The name consists of the
        field `field` of the request, the path in the schema, and the keyword. Characters that may
        not be in a header are replaced."""
        return _NOT_IN_NAMES.sub("?", ".".join((field, *self.path, self.keyword)))


def paths_of(schema: Any) -> dict[int, Path]:
    """Returns the path from the root of a schema to each object and list in the schema, keyed by
    the identity (`id`) of the object or list. The keys are valid as long as the schema exists."""
    found: dict[int, Path] = {}
    pending: list[tuple[Path, Any]] = [((), schema)]
    while pending:
        path, value = pending.pop()
        if not isinstance(value, dict | list) or id(value) in found:
            continue
        found[id(value)] = path
        members = value.items() if isinstance(value, dict) else enumerate(value)
        pending += [((*path, str(name)), inner) for name, inner in members]
    return found


def shown(names: Iterable[str]) -> list[str]:
    """Returns the names of keywords in the form in which the header of an HTTP response lists them,
    each name once. If the text would be too long, `...` replaces the last names."""
    found: list[str] = []
    n_left = MAX_HEADER_LENGTH
    for name in dict.fromkeys(names):
        n_left -= len(name) + len(SEPARATOR)
        if n_left < 0:
            return [*found, "..."]
        found.append(name)
    return found
