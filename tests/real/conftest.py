"""The checkpoint, the systems that serve it, and the environment of other people's clients."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models import smollm2
from tests.checkpoints import Oracle
from tests.environments import OUTSIDE
from tests.system.stack import ROOT, Stack, serving

HERE = Path(__file__).parent
MODEL = "smollm2"
"""Name of the model, which is the name of the served directory."""

CLIENTS = ROOT / ".venv" / "clients" / "bin"
OFFLINE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "npm_config_offline": "true",
}
"""Keeps clients to this machine: at the proxy's port nothing listens."""

TEST_TIMEOUT_S = 600
CLIENT_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is about the real checkpoint, and takes its time."""
    for item in items:
        if item.nodeid.startswith("tests/real/"):
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The checkpoint in the user's cache, which is made once, and checked by its digest."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("SSL_CERT_FILE")
        for name, value in OUTSIDE.items():
            environment.setenv(name, value)
        return smollm2.MODEL.fetch(smollm2.MODEL.default_directory())


@pytest.fixture(scope="session")
def as_it_is(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint under the name that clients know."""
    directory = tmp_path_factory.mktemp("as_it_is") / MODEL
    directory.symlink_to(checkpoint)
    return directory


@pytest.fixture(scope="session")
def with_tools(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a chat template that supports tools. The checkpoint's own template does
    not."""
    directory = tmp_path_factory.mktemp("with_tools") / MODEL
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text((HERE / "templates/tools.jinja").read_text())
    return directory


@pytest.fixture(scope="session")
def one_stage(as_it_is: Path) -> Iterator[Stack]:
    """The checkpoint on one stage. All tests share the system, so no test may damage it."""
    with serving(
        as_it_is, served_model_name=MODEL, dtype="float32", kv_memory="512MiB", threads=2
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def two_stages(with_tools: Path) -> Iterator[Stack]:
    """The checkpoint with tools on two stages. All tests share the system, so no test may damage
    it."""
    with serving(with_tools, dtype="float32", kv_memory="256MiB", stages=2) as stack:
        yield stack


@pytest.fixture(params=["one_stage", "two_stages"])
def stack(request: pytest.FixtureRequest) -> Stack:
    """Each of both systems."""
    running: Stack = request.getfixturevalue(request.param)
    return running


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Oracle:
    """The checkpoint as `transformers` runs it, in float32."""
    return Oracle(checkpoint)


@dataclass(frozen=True)
class Clients:
    """The environment that other people's clients are installed in."""

    home: Path
    """A directory for the files that clients write."""
    programs: Path = CLIENTS
    """The directory of their programs."""

    def run(self, *command: str | Path, **environment: str) -> str:
        """Runs a command in the clients' environment, in the directory `home` and without network.
        Returns its output.

        Raises:
            AssertionError: the command fails.
        """
        result = subprocess.run(
            [self.programs / command[0], *command[1:]],
            cwd=self.home,
            env={
                **{name: os.environ[name] for name in ("LANG", "PATH") if name in os.environ},
                **OFFLINE,
                "ANTHROPIC_API_KEY": "none",
                "HOME": str(self.home),
                "LLM_USER_PATH": str(self.home / "llm"),
                "OPENAI_API_KEY": "none",
                "PYTHONUNBUFFERED": "1",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return result.stdout

    def case(self, client: str, case: str, stack: Stack) -> Any:
        """Returns the result of a function in one of the programs in `clients/`, called for a
        system."""
        printed = self.run("python", HERE / "clients" / f"{client}_client.py", case, stack.http)
        return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    """The clients of others."""
    assert (CLIENTS / "python").exists(), f"{CLIENTS} is missing: `make test-real` makes it"
    return Clients(tmp_path_factory.mktemp("clients"))
