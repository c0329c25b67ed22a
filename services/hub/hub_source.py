"""The Hugging Face Hub as a source of checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.hub.cache import complete_snapshot
from services.hub.name import HubName
from services.hub.snapshot import fetch
from services.hub.source import Fetched, Say


@dataclass(frozen=True, slots=True)
class HubSource:
    """A checkpoint in a repository of the Hugging Face Hub."""

    name: HubName

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the source that a text names. Returns None if the text is not the name of a
        repository.

        A text that ends with `.gguf` is the name of a file, so the result is None, too.
        """
        name = None if text.endswith(".gguf") else HubName.parse(text)
        return None if name is None else cls(name)

    @property
    def model_name(self) -> str:
        return self.name.repository

    def fetched_in(self, cache: Path) -> Fetched | None:
        snapshot = complete_snapshot(self.name, cache)
        return None if snapshot is None else _fetched(snapshot)

    def fetch(self, *, say: Say, cache: Path | None = None) -> Fetched:
        return _fetched(fetch(self.name, say=say, cache=cache))

    def __str__(self) -> str:
        return str(self.name)


def _fetched(snapshot: Path) -> Fetched:
    return Fetched(snapshot, f"commit {snapshot.name}")
