"""What people call a model on the command line: a directory, a GGUF file, or a source elsewhere."""

import sys
from dataclasses import dataclass
from pathlib import Path

from services.hub.kinds import FORMS, source_in
from services.hub.source import SourceError

KINDS = f"a directory, a .gguf file, {FORMS}"


class NoModel(Exception):
    """There is no such model, or it cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is on this machine."""

    path: Path
    """Of its directory, or its GGUF file."""
    name: str | None = None
    """What its source calls it; None if it was here."""


def find(text: str) -> Model:
    """Returns the model that a text names, and fetches it from its source if need be.

    Raises:
        NoModel: it is nowhere, or cannot be fetched.
    """
    path = Path(text).expanduser()
    if path.exists():
        return Model(path)
    try:
        source = source_in(text)
        if source is None:
            raise NoModel(f"model: there is no {text}; it must be {KINDS}")
        fetched = source.fetch(say=say)
    except (ValueError, SourceError) as error:
        raise NoModel(f"model: {error}") from error
    say(f"{source} is {fetched.state}")
    return Model(fetched.path, source.model_name)


def say(line: str) -> None:
    """Says on standard error what happens."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
