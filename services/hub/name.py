"""Names of checkpoints on the hub: `org/name`, or `org/name@revision`."""

import re
from dataclasses import dataclass
from typing import Self

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w.-][\w./-]{{0,199}}))?")
MAIN = "main"
"""Revision that a name without a revision means."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository and one of its revisions."""

    repository: str
    revision: str = MAIN
    """A branch, a tag or a commit."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the repository and revision in a text. Returns None if the text has another
        form."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(found[1], found[2] or MAIN)

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"
