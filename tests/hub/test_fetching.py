"""Checkpoints come from a hub, whole and once, whatever happens on the way."""

import hashlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub, Repository, checkpoint
from tests.limits import HANG_S

NAME = "org/model"
WEIGHTS = random.Random(1).randbytes(3 << 20)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    repository = Repository(checkpoint(WEIGHTS, **{"chat_template.jinja": b"{{ messages }}"}))
    with FakeHub({NAME: repository}).serving() as serving:
        yield serving


def command(to: Path, *arguments: str, name: str = NAME) -> list[str]:
    return [sys.executable, "-m", "services.hub", name, "--to", str(to), *arguments]


def fetch(
    hub: FakeHub, to: Path, *arguments: str, name: str = NAME, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        command(to, *arguments, name=name),
        env=hub.environment(to.parent / "home", **variables),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_only_what_is_served_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repositories[NAME].files
    files |= {"consolidated.safetensors": b"the weights again", "modules.json": b"[]"}
    files |= {"1_Pooling/config.json": b"{1}", "1_Pooling/README.md": b"words"}
    done = fetch(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    commit = hub.repositories[NAME].commit
    assert done.stdout == f"{NAME}@main is commit {commit} in {tmp_path / 'm'}\n"
    to = tmp_path / "m"
    there = {
        path.relative_to(to).as_posix(): path.read_bytes()
        for path in to.rglob("*")
        if path.is_file()
    }
    wanted = (
        *("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"),
        *("modules.json", "1_Pooling/config.json"),
    )
    assert set(hub.paths) == set(wanted)
    assert there == {name: files[name] for name in wanted}
    assert set(hub.paths) == set(wanted)


@pytest.mark.thorough
def test_an_adapter_needs_no_model_beside_it(hub: FakeHub, tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w", "README.md": b""}
    hub.repositories["org/lora"] = Repository(files)
    assert fetch(hub, tmp_path / "a", name="org/lora").returncode == 0
    there = {path.name for path in (tmp_path / "a").iterdir()}
    assert there == {"adapter_config.json", "adapter_model.safetensors"}
    hub.repositories["org/bin"] = Repository({"adapter_config.json": b"{}", "a.bin": b""})
    refused = fetch(hub, tmp_path / "b", name="org/bin")
    assert "has no adapter_model.safetensors to serve" in refused.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            {
                "vocab.json": b"{}",
                "merges.txt": b"",
                "pytorch_model.bin": b"w",
                "rust_model.ot": b"",
            },
            ("config.json", "vocab.json", "merges.txt", "pytorch_model.bin"),
        ),
        pytest.param(
            {
                "tekken.json": b"{}",
                "pytorch_model.bin.index.json": b'{"weight_map": {"w": "pytorch_model-1.bin"}}',
                "pytorch_model-1.bin": b"w",
                "training_args.bin": b"",
            },
            ("config.json", "tekken.json", "pytorch_model.bin.index.json", "pytorch_model-1.bin"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["opt", "shards"],
)
def test_bins_are_fetched_where_there_are_no_safetensors(
    hub: FakeHub, tmp_path: Path, files: dict[str, bytes], wanted: tuple[str, ...]
) -> None:
    hub.repositories[NAME] = Repository({"config.json": b"{}", "README.md": b"", **files})
    done = fetch(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "m").iterdir()} == set(wanted)
    asked = len(hub.paths)
    assert fetch(hub, tmp_path / "m").returncode == 0
    assert len(hub.paths) == asked


@pytest.mark.thorough
def test_what_is_there_is_not_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path / "m").returncode == 0
    hub.repositories.clear()
    assert fetch(hub, tmp_path / "m").returncode == 0


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, 130, id="terminated", marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, 130, id="interrupted", marks=pytest.mark.thorough),
    ],
)
def test_a_process_that_has_ended_is_gone_on_from(
    hub: FakeHub, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    hub.hangs_after = 1 << 20
    environment = hub.environment(tmp_path / "home")
    ended = subprocess.Popen(command(tmp_path / "m"), env=environment)
    assert hub.is_hanging.wait(HANG_S)
    part = next((tmp_path / ".hub").rglob("*.part"))
    while part.stat().st_size < hub.hangs_after:
        assert ended.poll() is None
    ended.send_signal(number)
    assert ended.wait(30) == status  # though the connection is silent for longer
    assert not (tmp_path / "m").exists()
    hub.hangs_after = None
    done = fetch(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == [("model.safetensors", 0), ("model.safetensors", 1 << 20)]


def test_lost_connections_are_gone_on_from(hub: FakeHub, tmp_path: Path) -> None:
    hub.drops_after = 1 << 20
    done = fetch(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.ranges) >= 3
    assert max(begin for _, begin in hub.ranges) >= 2 << 20


@pytest.mark.thorough
def test_processes_at_once_fetch_it_once(hub: FakeHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "home")
    running = [subprocess.Popen(command(tmp_path / "m"), env=environment) for _ in range(3)]
    assert [process.wait(HANG_S) for process in running] == [0, 0, 0]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == [("model.safetensors", 0)]


@pytest.mark.thorough
def test_who_waits_fetches_nothing(hub: FakeHub, tmp_path: Path) -> None:
    late = fetch(hub, tmp_path / "m", "--wait", "--wait-s", "0.1")
    assert late.returncode == 1
    assert late.stderr == f"error: {NAME}@main: nobody has fetched it to {tmp_path / 'm'}\n"
    assert not hub.paths
    waiting = subprocess.Popen(
        command(tmp_path / "m", "--wait"), env=hub.environment(tmp_path / "home")
    )
    assert fetch(hub, tmp_path / "m").returncode == 0
    assert waiting.wait(HANG_S) == 0


@pytest.mark.thorough
def test_another_name_takes_its_place(hub: FakeHub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path / "m").returncode == 0
    hub.repositories["org/other"] = Repository(checkpoint(b"other"), commit="d" * 40)
    assert fetch(hub, tmp_path / "m", name="org/other@v1").returncode == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == b"other"


@pytest.mark.thorough
def test_a_branch_stays_what_it_was_when_it_was_fetched(hub: FakeHub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path / "m").returncode == 0
    hub.repositories[NAME] = Repository(checkpoint(b"newer"), commit="e" * 40)
    assert fetch(hub, tmp_path / "m").returncode == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == WEIGHTS
    assert fetch(hub, tmp_path / "m", name=f"{NAME}@{'e' * 40}").returncode == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == b"newer"


@pytest.mark.thorough
def test_a_directory_of_somebody_else_stays(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    done = fetch(hub, tmp_path / "m")
    assert done.returncode == 1
    assert "was not fetched by this command" in done.stderr


@pytest.mark.thorough
def test_other_content_than_promised_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / ".hub" / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    (blobs / f"{digest}.part").write_bytes(b"x" * 1000)
    done = fetch(hub, tmp_path / "m")
    assert done.returncode == 1
    assert "came with another content than promised" in done.stderr
    assert not (tmp_path / "m").exists()
    assert fetch(hub, tmp_path / "m").returncode == 0


@pytest.mark.parametrize(
    ("name", "variables", "reason"),
    [
        pytest.param("org/none", {}, "no such repository", id="none"),
        *(
            pytest.param(name, variables, reason, id=id_, marks=pytest.mark.thorough)
            for id_, name, variables, reason in (
                ("gated", "org/gated", {}, "is gated: accept its terms at"),
                ("wrong-token", "org/gated", {"HF_TOKEN": "wrong"}, "is gated: accept its terms"),
                ("revision", f"{NAME}@nothing", {}, "has no revision 'nothing'"),
                ("offline", NAME, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to fetch it"),
                ("unreachable", NAME, {"HF_ENDPOINT": "http://127.0.0.1:1"}, "cannot be reached"),
                ("empty", "org/empty", {}, "has no *.safetensors, no pytorch_model*.bin to serve"),
            )
        ),
    ],
)
def test_a_refusal_says_why(
    hub: FakeHub, tmp_path: Path, name: str, variables: dict[str, str], reason: str
) -> None:
    hub.repositories["org/gated"] = Repository(checkpoint(), is_gated=True)
    empty = checkpoint()
    del empty["model.safetensors"], empty["pytorch_model.bin"]
    empty["consolidated.safetensors"] = b"another form"
    hub.repositories["org/empty"] = Repository(empty)
    done = fetch(hub, tmp_path / "m", name=name, **variables)
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("variable", "is_file"),
    [("HF_TOKEN", False), ("HF_TOKEN_PATH", True)],
)
@pytest.mark.thorough
def test_a_token_opens_what_is_gated(
    hub: FakeHub, tmp_path: Path, variable: str, is_file: bool
) -> None:
    hub.repositories["org/gated"] = Repository(checkpoint(), is_gated=True)
    (tmp_path / "token").write_text(hub.token)
    refused = fetch(hub, tmp_path / "m", name="org/gated", HF_TOKEN_PATH=str(tmp_path / "none"))
    assert refused.returncode == 1
    variables = {variable: str(tmp_path / "token") if is_file else hub.token}
    done = fetch(hub, tmp_path / "m", name="org/gated", **variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a/b@",
        *(
            pytest.param(text, marks=pytest.mark.thorough)
            for text in ("model", "a/b/c", "./a/b", "a b/c", "-a/b")
        ),
    ],
)
def test_what_is_no_name_is_refused(hub: FakeHub, tmp_path: Path, text: str) -> None:
    done = fetch(hub, tmp_path / "m", name=f"{text}")
    assert done.returncode == 2
