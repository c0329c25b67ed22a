"""How long the messages of a call may take."""

import asyncio
import time

from services.common.exchange import N_TURNS, LoopTimer
from tests.limits import HANG_S

LIMIT_S = 0.2


async def test_a_timer_ends_when_its_loop_has_turned_for_its_time() -> None:
    ended = asyncio.Event()
    start_s = time.monotonic()
    LoopTimer(LIMIT_S, ended.set)
    await asyncio.wait_for(ended.wait(), HANG_S)
    assert time.monotonic() - start_s >= LIMIT_S


async def test_time_in_which_the_loop_stands_is_one_turn() -> None:
    ended = asyncio.Event()
    timer = LoopTimer(LIMIT_S, ended.set)
    time.sleep(2 * LIMIT_S)  # noqa: ASYNC251
    for _ in range(N_TURNS):
        await asyncio.sleep(0)
    assert not ended.is_set()
    timer.cancel()


async def test_a_timer_that_is_started_again_counts_from_there() -> None:
    n_ends = 0

    def restart_once() -> None:
        nonlocal n_ends
        n_ends += 1
        if n_ends == 1:
            timer.restart()
        else:
            ended.set()

    ended = asyncio.Event()
    start_s = time.monotonic()
    timer = LoopTimer(LIMIT_S, restart_once)
    await asyncio.wait_for(ended.wait(), HANG_S)
    assert time.monotonic() - start_s >= 2 * LIMIT_S
