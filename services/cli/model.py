"""Finds the model that the command line names: a directory, a GGUF file or a remote source."""

import sys
from dataclasses import dataclass
from pathlib import Path

from services.hub.kinds import FORMS, source_in
from services.hub.source import SourceError

KINDS = f"a directory, a .gguf file, {FORMS}"


class NoModel(Exception):
    """The model does not exist or cannot be fetched. The message says why."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that is on this machine."""

    path: Path
    """Path of the model's directory or GGUF file."""
    name: str | None = None
    """Name of the model at the remote source; None if the path was given on the command line."""


def find(text: str) -> FoundModel:
    """Returns the model that a text names: a path, or a remote source. For a remote source, the
    newest state of the model is fetched first, unless it has been fetched before.

    Raises:
        NoModel: there is no such model, or it cannot be fetched.
    """
    path = Path(text).expanduser()
    if path.exists():
        return FoundModel(path)
    try:
        source = source_in(text)
        if source is None:
            raise NoModel(f"model: there is no {text}; it must be {KINDS}")
        fetched = source.fetch(say=say)
    except (ValueError, SourceError) as error:
        raise NoModel(f"model: {error}") from error
    say(f"{source} is {fetched.state}")
    return FoundModel(fetched.path, source.model_name)


def say(line: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
