"""A little of what clients cause begins in each pass of the event loop, in order."""

import asyncio
from itertools import pairwise
from typing import Any

from services.frontend.loop_share import MIN_AT_ONCE, TURN_S, LoopShare


def share_of_short_passes() -> LoopShare:
    return LoopShare(asyncio.get_running_loop(), lambda: 0.0)


async def test_work_that_has_no_turn_in_a_pass_waits_for_the_next_in_order() -> None:
    share, done = share_of_short_passes(), list[int]()
    n = 3 * MIN_AT_ONCE - 1
    for number in range(n):
        share.take(lambda number=number: done.append(number))  # type: ignore[misc]
    for n_passes in range(1, 4):
        assert done == list(range(min(n, n_passes * MIN_AT_ONCE)))
        await asyncio.sleep(0)


async def test_work_may_ask_for_another_turn() -> None:
    share, passes = share_of_short_passes(), 0

    def work(n_left: int) -> None:
        if n_left:
            share.take(lambda: work(n_left - 1))

    work(5 * MIN_AT_ONCE)
    while share._waiting:
        await asyncio.sleep(0)
        passes += 1
    assert passes == 4


async def test_more_has_a_turn_where_passes_are_long() -> None:
    now_s, done = 0.0, list[int]()
    share = LoopShare(asyncio.get_running_loop(), lambda: now_s, turn_s=TURN_S)
    for number in range(40):
        share.take(lambda number=number: done.append(number))  # type: ignore[misc]
    n_before = len(done)
    now_s += 10.5 * TURN_S
    await asyncio.sleep(0)
    assert len(done) == n_before + 10
    await asyncio.sleep(0)
    assert len(done) == n_before + 10 + MIN_AT_ONCE


async def test_work_that_fails_keeps_nobody_from_a_turn() -> None:
    loop, failures, done = asyncio.get_running_loop(), list[Any](), list[bool]()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    share = share_of_short_passes()
    for _ in range(MIN_AT_ONCE):
        share.take(lambda: None)
    share.take(lambda: 1 // 0)  # type: ignore[arg-type]
    share.take(lambda: done.append(True))
    for _ in range(3):
        await asyncio.sleep(0)
    assert done == [True]
    assert [type(failure) for failure in failures] == [ZeroDivisionError]


async def test_tasks_have_their_turns_in_order_so_many_in_a_pass() -> None:
    loop, failures, done = asyncio.get_running_loop(), list[Any](), list[int]()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    share = LoopShare(loop, lambda: 0.0, at_once=3)

    async def work(number: int) -> None:
        await share.turn()
        done.append(number)

    tasks = [asyncio.ensure_future(work(number)) for number in range(9)]
    await asyncio.sleep(0)
    assert done == [0, 1, 2]
    tasks[4].cancel()  # no other task takes its turn
    counts = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(done))
        assert len(counts) < 20
    assert done == [0, 1, 2, 3, 5, 6, 7, 8]
    assert not failures
    assert max(later - earlier for earlier, later in pairwise([3, *counts])) == 3
