"""How the process tree ends: on signals, and with `--fail-fast` when any of its members dies; else
what has died comes back. Nothing hangs, nothing stays."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from orcinus.v1 import inference_pb2

from tests.limits import HANG_S
from tests.system.conftest import write_model
from tests.system.stack import ROOT, Stack, serving

BODY = {"prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True}
MAX_S = 30.0
"""For what ends or is found at once, or in ten seconds, and far less than any timeout of a
transfer."""
MAX_BACK_S = 60.0


@pytest.fixture(scope="module")
def healing(model: Path) -> Iterator[Stack]:
    """A system whose processes come back when they are lost; each test may harm it once, and the
    last one of this file stops it."""
    with serving(model, fail_fast=False, frontends=1) as stack:
        yield stack


def stream_until_it_breaks(stack: Stack) -> dict[str, object]:
    """The error that ends a stream: its last event, or the answer if it ends before the first."""
    body = {**BODY, "stream": True}
    with httpx.stream(
        "POST", f"{stack.http}/v1/completions", json=body, timeout=HANG_S
    ) as response:
        *_, last = (line for line in response.iter_lines() if line)
    error: dict[str, object] = json.loads(last.removeprefix("data:"))["error"]
    return error


def call_until_it_breaks(stack: Stack) -> grpc.StatusCode:
    """The status that ends a unary call."""
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7])),
        options=inference_pb2.GenerationOptions(max_tokens=3000, ignore_eos=True),
    )
    with stack.inference() as stub:
        with pytest.raises(grpc.RpcError) as error:
            stub.Generate(request, timeout=HANG_S)
        code: grpc.StatusCode = error.value.code()
        return code


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "index"),
    [
        pytest.param("services.worker.rank", 0, id="rank of stage 0"),
        pytest.param("services.worker.rank", 1, id="rank of stage 1"),
        pytest.param("services.worker", 0, id="controller of stage 0"),
        pytest.param("services.worker", 1, id="controller of stage 1"),
        pytest.param("services.scheduler", 0, id="scheduler"),
    ],
)
def test_a_member_that_is_killed_ends_its_requests_and_the_tree(
    model: Path, module: str, index: int
) -> None:
    with serving(model, stages=2) as stack, ThreadPoolExecutor(3) as threads:
        with stack.iterations() as watch:
            streamed = threads.submit(stream_until_it_breaks, stack)
            called = threads.submit(call_until_it_breaks, stack)
            posted = threads.submit(stack.post, "/v1/completions", BODY)
            watch.wait_for(lambda records: records and records[-1].n_running == 3)
        killed = time.monotonic()
        stack.kill(module, index)
        assert called.result() is grpc.StatusCode.UNAVAILABLE
        assert posted.result().status_code == 503
        assert streamed.result()["code"] == "unavailable"
        assert time.monotonic() - killed < MAX_S
        assert stack.wait() != 0
        assert stack.survivors() == []
        assert "".join(stack.output).splitlines()[-1].startswith("error: ")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM"),
    ],
)
def test_a_signal_stops_everything_cleanly(model: Path, number: signal.Signals) -> None:
    with serving(model, stages=2) as stack:
        assert len(stack.complete([5, 6], max_tokens=3, ignore_eos=True)["token_ids"]) == 3
        stack.send_signal(number)
        assert stack.wait() == 0
        assert stack.survivors() == []
        assert "Traceback" not in "".join(stack.output)


@pytest.mark.thorough
def test_a_frontend_that_is_killed_ends_the_tree(model: Path) -> None:
    with serving(model) as stack, ThreadPoolExecutor(1) as threads:
        with stack.iterations() as watch:
            posted = threads.submit(stack.post, "/v1/completions", BODY)
            watch.wait_for(lambda records: len(records) > 3)
        stack.kill("services.frontend")
        with pytest.raises(httpx.TransportError):
            posted.result()
        assert stack.wait() != 0
        assert stack.survivors() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "number"),
    [
        pytest.param("services.worker.rank", signal.SIGKILL, id="rank dies"),
        pytest.param("services.worker", signal.SIGKILL, id="controller dies"),
        pytest.param("services.scheduler", signal.SIGKILL, id="scheduler dies"),
        pytest.param("services.frontend", signal.SIGKILL, id="frontend dies"),
        pytest.param("services.worker", signal.SIGSTOP, id="controller stops"),
        pytest.param("services.scheduler", signal.SIGSTOP, id="scheduler stops"),
        pytest.param("services.frontend", signal.SIGSTOP, id="frontend stops"),
    ],
)
def test_a_member_that_is_lost_comes_back_where_it_was(
    healing: Stack, module: str, number: signal.Signals
) -> None:
    question = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    healing.look_at_tree()
    before = list(healing.tree)
    answer = answer_if_any(healing, question)
    assert answer is not None
    lost = psutil.Process(healing.pids(module)[0])
    lost.send_signal(number)
    lost.wait(MAX_S)
    deadline = time.monotonic() + MAX_BACK_S
    while (again := answer_if_any(healing, question)) is None:
        assert time.monotonic() < deadline, "".join(healing.output)
        time.sleep(0.1)
    assert again["token_ids"] == answer["token_ids"]
    assert "starting it again" in "".join(healing.output)
    healing.look_at_tree()
    assert len(healing.tree) == len(before)


def answer_if_any(stack: Stack, question: dict[str, object]) -> dict[str, object] | None:
    """The answer to a request; None where it is refused or its connection breaks."""
    with contextlib.suppress(httpx.TransportError):
        response = stack.post("/v1/completions", {**question, "return_token_ids": True})
        if response.status_code == 200:
            answer: dict[str, object] = response.json()["choices"][0]
            return answer
    return None


@pytest.mark.thorough
def test_no_call_fails_while_one_of_two_frontends_is_lost(model: Path) -> None:
    with serving(model, fail_fast=False, frontends=2, spares=0, metrics=True) as stack:
        [lost, other] = stack.pids("services.frontend")
        stack.kill("services.frontend", 0)
        psutil.Process(lost).wait(MAX_S)
        for _ in range(10):
            assert stack.complete([5, 6], max_tokens=3, ignore_eos=True)["token_ids"]
        deadline = time.monotonic() + MAX_BACK_S
        frontends: set[int] = set()
        while len(frontends) < 2:
            assert time.monotonic() < deadline, "".join(stack.output)
            time.sleep(0.1)
            with contextlib.suppress(psutil.NoSuchProcess):
                stack.look_at_tree()
                frontends = set(stack.pids("services.frontend"))
        assert other in frontends
        assert lost not in frontends


@pytest.mark.thorough
def test_a_stop_lets_running_requests_finish_and_refuses_new_ones(healing: Stack) -> None:
    with ThreadPoolExecutor(2) as threads:
        with healing.iterations() as watch:
            short = threads.submit(healing.complete, [5, 6], max_tokens=80, ignore_eos=True)
            watch.wait_for(lambda records: len(records) > 3)
        n_lines = len(healing.output)
        healing.send_signal(signal.SIGTERM)
        assert len(short.result()["token_ids"]) == 80
        with pytest.raises((httpx.TransportError, AssertionError)):
            healing.complete([5, 6], max_tokens=3)
        assert healing.wait() == 0
        assert healing.survivors() == []
        assert "Traceback" not in "".join(healing.output[n_lines:])


@pytest.mark.thorough
def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    alias = tmp_path / "alias"  # so that its processes are told from those of other tests
    alias.symlink_to(model)
    marker = f"--model={alias}"
    command = [sys.executable, "-m", "services.local", marker, "--http-port=0", "--grpc-port=0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as launcher:
        process = psutil.Process(launcher.pid)
        while not process.children():
            time.sleep(0.01)
        [child, *_] = process.children()
        launcher.kill()
    gone, _ = psutil.wait_procs([child], timeout=MAX_S)
    assert gone == [child]
    assert [
        p.pid for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or ())
    ] == []


@pytest.mark.thorough
def test_a_launcher_that_is_killed_takes_everything_with_it(model: Path) -> None:
    with serving(model) as stack:
        stack.send_signal(signal.SIGKILL)
        stack.wait()
        assert stack.survivors() == []


def run_local(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.local", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    result = run_local(f"--model={tmp_path}")
    assert result.returncode != 0
    assert f"no config.json in {tmp_path}" in result.stdout


def test_a_model_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = write_model(tmp_path, num_hidden_layers=1)
    result = run_local(f"--model={model}", "--stages=2", "--http-port=0", "--grpc-port=0")
    assert result.returncode != 0
    assert "1 layers cannot be divided among 2 stages" in result.stdout


@pytest.mark.thorough
def test_a_port_in_use_is_a_clear_error(model: Path, two_stages: Stack) -> None:
    port = two_stages.http.rpartition(":")[2]
    result = run_local(f"--model={model}", f"--http-port={port}", "--grpc-port=0", "--threads=1")
    assert result.returncode != 0
    assert port in result.stdout
    assert "in use" in result.stdout


@pytest.mark.parametrize(
    "option",
    [
        "--no-such-option=1",
        *(
            pytest.param(option, marks=pytest.mark.thorough)
            for option in ("--stages=0", "--dtype=int3")
        ),
    ],
)
def test_a_wrong_option_is_named(model: Path, option: str) -> None:
    result = run_local(f"--model={model}", option)
    assert result.returncode != 0
    assert option.partition("=")[0].removeprefix("--").split("-")[0] in result.stdout
    assert "Traceback" not in result.stdout
