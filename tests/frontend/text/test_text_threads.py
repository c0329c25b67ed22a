"""Work in threads: what it takes is counted as long as it runs, and little waits for much."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from services.common import errors
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.text.text_threads import MAX_WAITING_CHARACTERS, TextThreads
from tests.frontend.conftest import soon
from tests.limits import HANG_S


class Work:
    """Work that goes on until it is told to end."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(30)
        return "done"


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.may_end.set()


async def until_begun(work: Work) -> None:
    assert await soon(asyncio.to_thread(work.has_begun.wait, HANG_S))


def begin(
    threads: TextThreads,
    budget: MemoryBudget,
    work: Work,
    *,
    n_characters: int = 10,
    n_bytes: int = 10,
    is_short: bool = False,
) -> asyncio.Task[str]:
    """Starts a call that does the work and gives up its own share when it is cancelled."""

    async def call() -> str:
        with budget.share() as share:
            return await threads.run(
                work, share, n_characters=n_characters, n_bytes=n_bytes, is_short=is_short
            )

    return asyncio.ensure_future(call())


async def test_bytes_are_counted_until_the_thread_ends_whatever_its_client_does(work: Work) -> None:
    budget, threads = MemoryBudget(1000), TextThreads(Refusals())
    call = begin(threads, budget, work, n_bytes=200)
    await until_begun(work)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    assert budget.n_bytes == 200
    following = Work()
    following.may_end.set()
    waiting = begin(threads, budget, following, n_bytes=200)
    work.may_end.set()
    assert await soon(waiting) == "done"
    assert budget.n_bytes == 0


async def test_work_whose_client_has_gone_is_not_begun(work: Work) -> None:
    budget, threads = MemoryBudget(1000), TextThreads(Refusals())
    running = begin(threads, budget, work)
    await until_begun(work)
    skipped, last = Work(), Work()
    last.may_end.set()
    gone = begin(threads, budget, skipped)
    following = begin(threads, budget, last)
    await asyncio.sleep(0)
    gone.cancel()
    work.may_end.set()
    assert await soon(following) == "done"
    assert await soon(running) == "done"
    assert not skipped.has_begun.is_set()


async def test_short_work_does_not_wait_for_long_work(work: Work) -> None:
    budget, threads = MemoryBudget(1000), TextThreads(Refusals())
    running = begin(threads, budget, work)
    await until_begun(work)
    short = Work()
    short.may_end.set()
    assert await soon(begin(threads, budget, short, is_short=True)) == "done"
    work.may_end.set()
    await soon(running)


async def test_what_waits_for_a_thread_is_bounded(work: Work) -> None:
    refusals = Refusals()
    budget, threads = MemoryBudget(1000), TextThreads(refusals)
    calls = [begin(threads, budget, work)]
    await until_begun(work)
    calls += [begin(threads, budget, work, n_characters=MAX_WAITING_CHARACTERS)]
    await asyncio.sleep(0)
    with pytest.raises(errors.PoolFull, match="texts"):
        await soon(begin(threads, budget, work, n_characters=1))
    assert refusals[Refusal.IN_FLIGHT] == 1
    work.may_end.set()
    assert await soon(asyncio.gather(*calls)) == ["done"] * 2
    assert await soon(begin(threads, budget, work, n_characters=1)) == "done"


async def test_memory_that_is_not_left_keeps_no_thread(work: Work) -> None:
    budget, threads = MemoryBudget(1000), TextThreads(Refusals())
    with budget.share(900), pytest.raises(errors.PoolFull):
        await soon(begin(threads, budget, work, n_bytes=200))
    work.may_end.set()
    assert await soon(begin(threads, budget, work, n_bytes=200)) == "done"
    assert budget.n_bytes == 0


async def test_work_that_takes_much_leaves_memory_to_others(work: Work) -> None:
    budget, threads = MemoryBudget(1000), TextThreads(Refusals())
    call = begin(threads, budget, work, n_bytes=5000)
    await until_begun(work)
    with budget.share(700):
        assert budget.n_bytes == 950
    work.may_end.set()
    await soon(call)
    assert budget.n_bytes == 0
