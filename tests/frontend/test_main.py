"""The frontend as a process: addresses on the ready pipe, signals, and starts that fail."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_scheduler import FakeScheduler, keeps_quiet
from tests.frontend import checkpoints
from tests.limits import HANG_S

pytestmark = pytest.mark.system

START_S = 60.0
"""A process imports much before it says anything."""


@contextmanager
def frontend_process(
    directory: Path, scheduler: str, *arguments: str, launched: bool = True
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A frontend and the pipe on which it reports."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "services.frontend", "--model", str(directory)]
    command += ["--scheduler", scheduler, "--http-address", "127.0.0.1:0"]
    command += ["--grpc-address", "127.0.0.1:0", *arguments]
    if launched:
        command += ["--ready-fd", str(writing)]
    path = os.pathsep.join([".", "protos/gen"])
    process = subprocess.Popen(
        command,
        pass_fds=[writing],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    os.close(writing)
    try:
        yield process, reading
    finally:
        process.kill()
        process.communicate()
        os.close(reading)


def first_report(reading: int) -> dict[str, Any]:
    """The first message that is more than a sign of life."""
    with os.fdopen(reading, closefd=False) as lines:
        messages = (json.loads(line) for line in lines)
        return next(message for message in messages if message)


async def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit status and what it wrote."""
    _, said = await asyncio.to_thread(process.communicate, timeout=START_S)
    return process.returncode, said.decode()


@asynccontextmanager
async def ready(directory: Path) -> AsyncIterator[tuple[Any, FakeScheduler, httpx.AsyncClient]]:
    """A process that says it is ready."""
    checkpoints.write_checkpoint(directory)
    scheduler = FakeScheduler(keeps_quiet)
    with frontend_process(directory, await scheduler.start()) as (process, reading):
        async with asyncio.timeout(START_S):
            addresses = await asyncio.to_thread(first_report, reading)
        assert addresses.keys() == {"task", "http", "grpc", "metrics"}
        url = f"http://{addresses['http']}"
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
            yield process, scheduler, http
    await scheduler.stop()


@pytest.mark.thorough
async def test_signal_to_an_idle_frontend_ends_it(tmp_path: Path) -> None:
    async with ready(tmp_path) as (process, _, http):
        assert (await http.get("/ready")).status_code == 200
        process.send_signal(signal.SIGTERM)
        status, said = await ended(process)
        assert status == 0
        assert "Traceback" not in said


async def test_second_signal_ends_running_requests(tmp_path: Path) -> None:
    async with ready(tmp_path) as (process, scheduler, http):
        waiting = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "x"}))
        await scheduler.wait_requests()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(HANG_S):
            while (await http.get("/ready")).status_code != 503:
                pass
        process.send_signal(signal.SIGINT)
        assert (await waiting).status_code == 503
        status, said = await ended(process)
        assert status == 0
        assert "Traceback" not in said


@pytest.mark.parametrize(
    "option",
    ["--http-address", pytest.param("--grpc-address", marks=pytest.mark.thorough)],
)
async def test_taken_port_is_said_and_ends_the_start(tmp_path: Path, option: str) -> None:
    checkpoints.write_checkpoint(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with frontend_process(tmp_path, "127.0.0.1:1", option, address, launched=False) as (
            process,
            _,
        ):
            status, said = await ended(process)
    assert status == 1
    assert said.splitlines()[-1].startswith(f"error: cannot listen on {address}: ")
    assert "Traceback" not in said


@pytest.mark.thorough
async def test_directory_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with frontend_process(tmp_path, "127.0.0.1:1", launched=False) as (process, _):
        status, said = await ended(process)
    assert status == 1
    assert said == f"error: no tokenizer.json in {tmp_path}\n"


async def test_launcher_hears_on_the_pipe_why_a_frontend_does_not_start(tmp_path: Path) -> None:
    with frontend_process(tmp_path, "127.0.0.1:1") as (process, reading):
        heard = await asyncio.to_thread(first_report, reading)
        status, said = await ended(process)
    assert heard == {"error": f"no tokenizer.json in {tmp_path}"}
    assert (status, said) == (1, "")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        pytest.param("tokenizer.json", "{", "tokenizer.json is not JSON", id="tokenizer"),
        *(
            pytest.param(file, content, words, id=id_, marks=pytest.mark.thorough)
            for id_, file, content, words in (
                ("config", "tokenizer_config.json", "{", "tokenizer_config.json"),
                ("template", "chat_template.jinja", "a\n{% for %}\nb", "the chat template"),
            )
        ),
    ],
)
async def test_broken_checkpoint_is_said_in_one_line(
    tmp_path: Path, file: str, content: str, words: str
) -> None:
    checkpoints.write_checkpoint(tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with frontend_process(tmp_path, "127.0.0.1:1", launched=False) as (process, _):
        status, said = await ended(process)
    assert status == 1
    (line,) = said.splitlines()
    assert words in line
    assert str(tmp_path) in line


async def test_importing_the_frontend_brings_no_tensors() -> None:
    code = (
        "import sys, services.frontend.frontend;print({'torch', 'transformers'} & set(sys.modules))"
    )
    path = os.pathsep.join([".", "protos/gen"])
    command = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    said, _ = await command.communicate()
    assert said.strip() == b"set()"
