"""The interface of sources of checkpoints: where a checkpoint is, and how it is fetched.

A cache is a directory in which each kind of source has folders of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Say = Callable[[str], None]
"""A function that is called with a line of text about the progress of a fetch."""


class SourceError(Exception):
    """A checkpoint cannot be fetched from its source; the message has the reason and a remedy."""


class SourceUnreachable(SourceError):
    """A source does not answer. Its present content is therefore unknown."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint that is on this machine."""

    path: Path
    """Path of the checkpoint's directory, or of its GGUF file."""
    state: str
    """Version of the checkpoint as a text for people, for example a commit."""


class Source(Protocol):
    """A checkpoint at a source. `str` of the object is the text that names the source on a command
    line."""

    @property
    def model_name(self) -> str:
        """Default name of the model in the API. The settings may give the model another name."""

    def fetched_in(self, cache: Path) -> Fetched | None:
        """Returns the checkpoint that was last fetched into a cache. Uses no connection.

        Returns None if the checkpoint is not complete in the cache.
        """

    def fetch(self, *, say: Say, cache: Path | None = None) -> Fetched:
        """Fetches the newest state of the checkpoint into a cache, by default this user's cache,
        and returns the checkpoint.

        If several processes want the same checkpoint, one of them fetches it and the others wait.
        If the source cannot be reached but the cache has a complete checkpoint, the method returns
        that checkpoint.

        Raises:
            SourceError: the checkpoint cannot be fetched, or does not fit on the disk.
        """
