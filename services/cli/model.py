"""What people call a model on the command line: a directory, a GGUF file, or a name on the hub."""

import sys
from dataclasses import dataclass
from pathlib import Path

from services.hub.errors import HubError
from services.hub.name import HubName
from services.hub.snapshot import fetch

KINDS = "a directory, a .gguf file, or a name on the hub such as org/name or org/name@revision"


class NoModel(Exception):
    """There is no such model, or it cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is on this machine."""

    path: Path
    """Of its directory, or its GGUF file."""
    hub_name: str | None = None
    """What the hub calls it; None if it came from elsewhere."""


def find(text: str) -> Model:
    """Returns the model that a text names, and fetches it from the hub if need be.

    Raises:
        NoModel: it is nowhere, or cannot be fetched.
    """
    path = Path(text).expanduser()
    if path.exists():
        return Model(path)
    name = HubName.parse(text)
    if name is None or path.suffix == ".gguf":
        raise NoModel(f"model: there is no {text}; it must be {KINDS}")
    try:
        fetched = fetch(name, say=say)
    except HubError as error:
        raise NoModel(f"model: {error}") from error
    say(f"{name.repository} is commit {fetched.commit}")
    return Model(fetched.directory, name.repository)


def say(line: str) -> None:
    """Says on standard error what happens."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
