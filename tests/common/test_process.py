"""The pipe to the launcher, and dying with the parent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from services.common.process import ReadyPipe, run, stop_event, wait_for_turn
from tests.limits import HANG_S


def test_the_ready_pipe_writes_a_line_of_json_per_message() -> None:
    read_fd, write_fd = os.pipe()
    pipe = ReadyPipe(write_fd)
    pipe.report({"address": "127.0.0.1:5"})
    pipe.report({"ready": True})
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        assert [json.loads(line) for line in lines] == [{"address": "127.0.0.1:5"}, {"ready": True}]


def test_a_service_beats_before_it_reports_anything() -> None:
    """So that a launcher expects beats from then on, also of a service that is stopped at once."""
    read_fd, write_fd = os.pipe()
    pipe = ReadyPipe(write_fd)
    with pipe.beating():
        pipe.report({"ready": True})
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        assert [json.loads(line) for line in lines][:2] == [{}, {"ready": True}]


def test_a_launcher_that_is_gone_is_an_error_and_none_at_all_is_not() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with pytest.raises(BrokenPipeError):
        ReadyPipe(write_fd).report({"ready": True})
    os.close(write_fd)
    ReadyPipe(None).report({"ready": True})


@pytest.mark.parametrize("has_launcher", [True, False])
def test_a_spare_ends_quietly_when_its_launcher_ends(has_launcher: bool) -> None:
    turn_fd, write_turn_fd = os.pipe()
    report_fd, ready_fd = os.pipe()
    os.close(write_turn_fd)
    if not has_launcher:
        os.close(report_fd)
    with pytest.raises(SystemExit) as caught:
        wait_for_turn(turn_fd, ready_fd=ready_fd)
    assert caught.value.code == 0
    os.close(ready_fd)
    if has_launcher:
        with os.fdopen(report_fd) as lines:
            assert json.loads(lines.read()) == {"waits_for_turn": True}


def test_a_spare_goes_on_when_it_has_its_turn() -> None:
    turn_fd, write_turn_fd = os.pipe()
    os.write(write_turn_fd, b"1")
    wait_for_turn(turn_fd, ready_fd=None)
    os.close(write_turn_fd)
    wait_for_turn(None, ready_fd=None)


def test_a_service_whose_launcher_died_before_it_began_stops() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)

    async def serve() -> int:
        await asyncio.wait_for(stop_event().wait(), HANG_S)
        return 7

    assert run(serve(), ready_fd=write_fd) == 7
    os.close(write_fd)


TOLD_TO_STOP_AT_ONCE = """
import asyncio, os, signal
os.kill(os.getpid(), signal.SIGTERM)
from services.common.process import run, stop_event

async def serve():
    await asyncio.wait_for(stop_event().wait(), 30)
    return 7

raise SystemExit(run(serve()))
"""


def test_a_container_that_is_told_to_stop_while_it_starts_stops() -> None:
    """Without the block, the signal ends this process; process 1 of a container would lose it."""
    command = [sys.executable, "-c", TOLD_TO_STOP_AT_ONCE]
    blocked = ["env", "--block-signal=TERM", *command]
    assert subprocess.run(blocked, timeout=HANG_S, check=False).returncode == 7
    assert subprocess.run(command, timeout=HANG_S, check=False).returncode == -signal.SIGTERM


def test_a_service_runs_under_a_watchdog() -> None:
    async def serve() -> int:
        return sum(thread.name == "watchdog" for thread in threading.enumerate())

    assert run(serve()) == 1
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel feature is Linux's")
def test_a_child_dies_with_its_parent_even_if_that_is_killed() -> None:
    child = (
        "from services.common.process import die_with_parent\n"
        "die_with_parent(); print(1, flush=True); input()"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()
    deadline = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_thread_that_is_stuck_does_not_keep_a_process_from_ending() -> None:
    script = (
        "import sys, threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from services.common.process import end_within\n"
        "ThreadPoolExecutor(1).submit(threading.Event().wait, 60)\n"
        "end_within(0.1, 3)\n"
        "sys.exit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=HANG_S, check=False)
    assert ended.returncode == 3
