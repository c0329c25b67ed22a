"""What a source of checkpoints is, whatever its kind: where one lies, and how it gets here.

A cache is a directory in which each kind has folders of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Say = Callable[[str], None]
"""A function that is told, in a line, what happens."""


class SourceError(Exception):
    """A checkpoint cannot be had from its source; the message says why, and what helps."""


class SourceUnreachable(SourceError):
    """A source does not answer, so that nobody knows what it has now."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint that is here."""

    path: Path
    """Of its directory, or of its GGUF file."""
    state: str
    """Which state of the source it is, in words."""


class Source(Protocol):
    """A checkpoint that lies elsewhere; its text is what people call it."""

    @property
    def model_name(self) -> str:
        """The name of the model in the API, where no other is set."""

    def fetched_in(self, cache: Path) -> Fetched | None:
        """Returns what the source meant when it was last fetched into a cache; None if that is not
        all here. Asks nobody elsewhere."""

    def fetch(self, *, say: Say, cache: Path | None = None) -> Fetched:
        """Returns the checkpoint as it is at the source, once all is in a cache: by default the one
        of this user. Of processes that fetch the same, one does, and the others wait for it. Where
        the source cannot be reached, it is what the source last meant, if that is all here.

        Raises:
            SourceError: it cannot be had, or does not fit on the disk.
        """
