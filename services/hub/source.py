"""The interface of sources of checkpoints: where a checkpoint is, and how it is fetched.

A cache is a directory in which each kind of source has folders of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Say = Callable[[str], None]
"""A function that takes a line which says what is happening."""


class SourceError(Exception):
    """A checkpoint cannot be fetched from its source; the message says why, and what helps."""


class SourceUnreachable(SourceError):
    """A source does not answer, so that its present content is unknown."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint that is on this machine."""

    path: Path
    """Path of the checkpoint's directory, or of its GGUF file."""
    state: str
    """Version of the checkpoint as a text for people, such as a commit."""


class Source(Protocol):
    """A checkpoint at a source. Its `str` is the text that names the source on a command line."""

    @property
    def model_name(self) -> str:
        """Name of the model in the API, if the settings name no other."""

    def fetched_in(self, cache: Path) -> Fetched | None:
        """Returns the checkpoint that was last fetched into a cache, without any connection.

        Returns None if the checkpoint is not complete in the cache.
        """

    def fetch(self, *, say: Say, cache: Path | None = None) -> Fetched:
        """Fetches the checkpoint as it is at the source into a cache, by default that of this user,
        and returns it. Of several processes that fetch the same checkpoint, one does, and the
        others wait for it. If the source cannot be reached, the checkpoint that was last fetched is
        returned, if it is complete.

        Raises:
            SourceError: the checkpoint cannot be fetched, or does not fit on the disk.
        """
