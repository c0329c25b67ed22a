"""A parrot that all clients of this folder talk to, each by its own script, and their programs."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.real.conftest import CLIENTS, HERE, Clients
from tests.scripted_parrot import Line, write_scripted_parrot
from tests.system.stack import ROOT, Stack, serving

PARROT = "parrot"
"""Name of the model, which is the name of the served directory."""

NODE = HERE / "agents" / "node_modules"
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


class Sdks:
    """Programs that use libraries: each runs all its cases over one API at once."""

    def __init__(self, home: Path, url: str) -> None:
        self._home = home
        self._url = url
        self._outcomes = cache(self._run)

    def outcome(self, client: str, api: str, case: str) -> Any:
        """Returns the result of a client's case over an API, or its error as text."""
        return self._outcomes(client, api)[case]

    def _run(self, client: str, api: str) -> dict[str, Any]:
        clients = Clients(self._home, installed(SDKS))
        python = HERE / "clients" / f"{client}_client.py"
        program: tuple[str | Path, ...] = ("python", python)
        if not python.exists():
            node = shutil.which("node")
            assert node, "node is missing (Debian: apt-get install nodejs)"
            program = (node, installed(NODE).parent / f"{client}_client.mjs")
        printed = clients.run(*program, api, self._url, PYTHONPATH=str(ROOT))
        outcomes: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return outcomes


@pytest.fixture(scope="package")
def sdks(parrot: Stack, tmp_path_factory: pytest.TempPathFactory) -> Sdks:
    """Libraries for Python and for Node.js, each in an environment of its own."""
    return Sdks(tmp_path_factory.mktemp("sdks"), parrot.http)


def installed(directory: Path) -> Path:
    """Returns a directory that `make test-real` makes."""
    assert directory.exists(), f"{directory} is missing: `make test-real` makes it"
    return directory
