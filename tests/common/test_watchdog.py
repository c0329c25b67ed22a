"""The thread that ends a process whose event loop no longer turns."""

import asyncio
import queue
import signal
import subprocess
import sys
import time

import pytest

from services.common.watchdog import HUNG_STATUS, Watchdog, watched
from tests.limits import HANG_S

TURN_THEN = """
import asyncio, time
from services.common.watchdog import Watchdog, watched
async def main():
    await asyncio.sleep(0.1)
    print("turning", flush=True)
    await asyncio.sleep({sleep_s})
    time.sleep({hang_s})
    return 5
raise SystemExit(asyncio.run(watched(main(), Watchdog(limit_s=1.0, tick_s=0.1))))
"""


def start(*, sleep_s: float, hang_s: float) -> "subprocess.Popen[str]":
    code = TURN_THEN.format(sleep_s=sleep_s, hang_s=hang_s)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


async def test_a_loop_that_stands_is_reported_once() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Watchdog(limit_s=1.0, tick_s=0.1, on_hang=reasons.put) as watchdog:
        turning = asyncio.create_task(watchdog.turn())
        await asyncio.sleep(0.1)
        assert reasons.empty()
        reason = reasons.get(timeout=HANG_S)  # it stands here
        assert reason == "the event loop has not turned for 1 s"
        turning.cancel()
    assert reasons.empty()


def test_a_loop_that_has_not_begun_is_not_watched() -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Watchdog(limit_s=0.05, tick_s=0.01, on_hang=reasons.put):
        time.sleep(0.3)
    assert reasons.empty()


async def test_the_result_of_what_is_watched_is_returned_and_the_thread_ends() -> None:
    async def main() -> int:
        await asyncio.sleep(0)
        return 3

    watchdog = Watchdog()
    assert await watched(main(), watchdog) == 3
    assert not watchdog._thread.is_alive()


def test_a_process_that_hangs_says_where_and_ends() -> None:
    with start(sleep_s=0, hang_s=60) as process:
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == HUNG_STATUS
    assert "in main" in errors, "the stack of the main thread"


@pytest.mark.thorough
def test_a_process_that_was_stopped_for_longer_than_the_limit_goes_on() -> None:
    with start(sleep_s=1, hang_s=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "turning\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 5
