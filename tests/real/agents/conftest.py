"""A parrot that all clients of this folder talk to, each by its own script, and their programs."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.real.conftest import CLIENTS, Clients
from tests.scripted_parrot import Line, write_scripted_parrot
from tests.system.stack import Stack, serving

PARROT = "parrot"
"""The model's name: that of the directory that is served."""

HERE = Path(__file__).parent
NODE = HERE / "node_modules"
SDKS = CLIENTS.parents[1] / "sdks" / "bin"
AIDER = CLIENTS.parents[1] / "aider" / "bin"


@pytest.fixture(scope="package")
def parrot(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A model that answers by the `SCRIPT` of each module of this folder."""
    modules: set[ModuleType] = {
        item.module for item in request.session.items if isinstance(item, pytest.Function)
    }
    script: list[Line] = [line for module in modules for line in getattr(module, "SCRIPT", ())]
    directory = tmp_path_factory.mktemp("scripted") / PARROT
    write_scripted_parrot(directory, script)
    with serving(directory, kv_memory="256MiB", threads=2) as stack:
        yield stack


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory that agents work in."""
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's directory, where agents keep sessions and settings."""
    directory = tmp_path / "home"
    directory.mkdir()
    return directory


@pytest.fixture
def sdks(tmp_path: Path) -> Clients:
    """Libraries for Python, in an environment of their own."""
    assert (SDKS / "python").exists(), f"{SDKS} is missing: `make test-real` makes it"
    return Clients(tmp_path, SDKS)


def node_programs() -> Path:
    """The directory of what npm has installed."""
    assert NODE.exists(), f"{NODE} is missing: `make test-real` makes it"
    return NODE
