"""The command itself: from a name on a hub to answers, with nothing left behind."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.__main__ import COMMANDS, main
from services.cli.local_system import READY
from services.cli.model import NoModel
from services.cli.programs import options_for_several, with_adapters
from tests.fake_hub import FakeHub, Repository
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
COMMIT = "ab" * 20


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables with which the demo model comes from a hub."""
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    hub = FakeHub({"org/demo": Repository(files, commit=COMMIT)})
    with hub.serving():
        yield {**hub.environment(tmp_path / "home"), "PATH": os.environ["PATH"]}


def orcinus(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


def run(
    environment: dict[str, str], *arguments: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        orcinus(*arguments),
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.system
def test_a_name_on_the_hub_is_served_and_talked_to(environment: dict[str, str]) -> None:
    ports = ("--http-port=0", "--grpc-port=0")
    serving = subprocess.Popen(
        orcinus("serve", "org/demo@v1", *ports, "--stages=2"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stdout is not None
    line = serving.stdout.readline()
    assert line.startswith("Orcinus serves org/demo on 2 stages: ")
    found = READY.match(line)
    assert found is not None
    load = ("--users=3", "--requests=6", "--prompt-tokens=20", "--output-tokens=8")
    bench = run(environment, "bench", "--url", found[1], *load)
    assert (bench.returncode, bench.stderr) == (0, "")
    assert bench.stdout.startswith("6 requests of 20 + 8 tokens, 3 users, ")
    chat = run(environment, "chat", "--url", found[1], "--max-tokens=4", text="Hello\n")
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout.strip()
    serving.send_signal(signal.SIGTERM)
    _, said = serving.communicate(timeout=HANG_S)
    assert serving.returncode == 0
    assert f"org/demo@v1 is commit {COMMIT}\n" in said


def test_sources_of_adapters_become_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("law", "medicine"):
        (tmp_path / name).mkdir()
    law, medicine = f"law={tmp_path / 'law'}", f"org/m={tmp_path / 'medicine'}"
    given = ["--model=x", "--adapters=law=law,org/m=medicine", "--adapters", "law=./law", "--tp=2"]
    expected = ["--model=x", f"--adapters={law},{medicine}", "--adapters", law, "--tp=2"]
    assert with_adapters(given) == expected
    with pytest.raises(NoModel, match="there is no nothing"):
        with_adapters(["--adapters=x=nothing"])


def test_several_models_are_served_under_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "chat=odd"):
        (tmp_path / name).mkdir()
    options = options_for_several(["small", "large=small"])
    assert options == [f"--model={name}={tmp_path / 'small'}" for name in ("small", "large")]
    assert options_for_several(["x=chat=odd"]) == [f"--model=x={tmp_path / 'chat=odd'}"]
    with pytest.raises(NoModel, match="there is no nothing"):
        options_for_several(["small", "x=nothing"])


@pytest.mark.system
@pytest.mark.thorough
def test_a_chat_with_a_model_takes_its_system_along(environment: dict[str, str]) -> None:
    arguments = ("chat", str(DEMO), "--max-tokens=4", "--max-batch-size=2")
    chatting = subprocess.Popen(
        orcinus(*arguments),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert chatting.stdin is not None
    assert chatting.stdout is not None
    chatting.stdin.write("Hello\n")
    chatting.stdin.flush()
    assert chatting.stdout.readline()
    tree = psutil.Process(chatting.pid).children(recursive=True)
    assert len(tree) >= 4
    chatting.kill()  # not even then
    chatting.wait(HANG_S)
    deadline = time.monotonic() + HANG_S
    while any(process.is_running() for process in tree):
        assert time.monotonic() < deadline
    chatting.stdin.close()
    chatting.stdout.close()


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["serve"], ["tune", "--help"], ["serve", "-h"]])
def test_help_of_programs_says_how_they_are_called(
    environment: dict[str, str], arguments: list[str]
) -> None:
    done = run(environment, *arguments)
    assert done.returncode == 0
    models = "MODEL [MODEL …]" if arguments[0] == "serve" else "MODEL"
    assert done.stdout.startswith(f"usage: orcinus {arguments[0]} {models} [options]\n")
    assert "--stages" in done.stdout or "--budget-s" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(["serve", "org/none"], "no such repository", id="hub"),
        *(
            pytest.param(arguments, reason, id=id_, marks=pytest.mark.thorough)
            for id_, arguments, reason in (
                ("order", ["serve", "--stages=2", "models/demo"], "MODEL comes before all options"),
                ("path", ["serve", "./nowhere"], "there is no ./nowhere"),
                ("chat", ["chat", "./nowhere"], "there is no ./nowhere"),
            )
        ),
    ],
)
def test_a_model_that_cannot_be_had_ends_it(
    environment: dict[str, str], arguments: list[str], reason: str
) -> None:
    done = run(environment, *arguments)
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]


def test_the_command_is_installed_and_lists_all_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"orcinus": f"{main.__module__}:main"}
    assert main([]) == 2
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["nothing"]) == 2
    assert "there is no command 'nothing'" in capsys.readouterr().err
    assert main(["--version"]) == 0


def test_the_command_runs_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: called.append((path, arguments)))
    COMMANDS["arena"].main(["orca", "--json"])
    [(path, arguments)] = called
    assert path == sys.executable
    assert arguments == [sys.executable, "-m", "services.arena", "orca", "--json"]
