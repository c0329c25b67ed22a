"""The subscription to the scheduler that leads: finding it, losing it, and finding the next."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from orcinus.v1 import watch_pb2

from services.frontend.watching.subscription import NO_LEADER, REASONS, Subscription
from tests.fake_scheduler import FakeScheduler
from tests.fake_watch import FakeWatch, decision, epoch, iteration
from tests.frontend.conftest import EAGER, soon, start_all


class Log:
    """What a watcher was told, one after the other: a word, or the kind of an event."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()

    def opened(self) -> None:
        self.told.put_nowait("opened")

    def received(self, events: Sequence[watch_pb2.WatchEvent]) -> None:
        for event in events:
            self.told.put_nowait(str(event.WhichOneof("event")))

    def lost(self, reason: str) -> None:
        self.told.put_nowait(reason)

    async def next(self, n_words: int) -> list[str]:
        return [await soon(self.told.get()) for _ in range(n_words)]

    async def until(self, word: str) -> None:
        while await soon(self.told.get()) != word:
            pass


@asynccontextmanager
async def subscribed(*schedulers: FakeScheduler, has_decisions: bool = False) -> AsyncIterator[Log]:
    """A watcher of schedulers of which one leads."""
    log = Log()
    subscription = Subscription(await start_all(*schedulers), backoff=EAGER)
    running = asyncio.ensure_future(subscription.run(log, has_decisions=has_decisions))
    try:
        yield log
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for scheduler in schedulers:
            await scheduler.stop()


async def test_events_come_in_order_from_the_beginning() -> None:
    watch = FakeWatch(epoch(1), decision("{}"))
    async with subscribed(FakeScheduler(watch=watch), has_decisions=True) as log:
        assert await log.next(3) == ["opened", "epoch", "decision"]
        watch.tell(iteration(1, 7), epoch(2))
        assert await log.next(2) == ["iteration", "epoch"]
        assert watch.asked == [True]


async def test_it_opens_before_the_first_event() -> None:
    watch = FakeWatch(epoch(1))
    watch.first = ()
    async with subscribed(FakeScheduler(watch=watch)) as log:
        assert await log.next(1) == ["opened"]


async def test_a_stream_that_ends_is_opened_again() -> None:
    watch = FakeWatch(epoch(1))
    async with subscribed(FakeScheduler(watch=watch)) as log:
        assert await log.next(2) == ["opened", "epoch"]
        watch.end()
        assert await log.next(3) == [NO_LEADER, "opened", "epoch"]
        assert watch.asked == [False, False]


async def test_it_follows_who_leads() -> None:
    first, second = FakeWatch(epoch(1)), FakeWatch(decision("{}"))
    leading = FakeScheduler(watch=first)
    standing_by = FakeScheduler(watch=second, is_leading=False)
    async with subscribed(leading, standing_by) as log:
        assert await log.next(2) == ["opened", "epoch"]
        assert second.asked == []
        await leading.stand_by()
        await standing_by.lead()
        first.end()
        await log.until("decision")
        assert (first.asked, second.asked) == ([False], [False])


async def test_it_comes_back_to_a_scheduler_that_is_started_again() -> None:
    first, second = FakeScheduler(watch=FakeWatch(epoch(1))), FakeScheduler(watch=FakeWatch())
    async with subscribed(first) as log:
        await log.until("epoch")
        address = first.address
        await first.stop()
        assert await log.next(1) == [NO_LEADER]
        await second.start(address)
        await log.until("epoch")
    await second.stop()


async def test_a_scheduler_that_cannot_be_watched_is_said_to_be_of_another_version() -> None:
    async with subscribed(FakeScheduler()) as log:
        [reason] = await log.next(1)
        assert reason == "the scheduler is of a version that cannot be watched"
        assert reason in REASONS.values()


async def test_a_watch_that_is_cancelled_ends_at_the_scheduler() -> None:
    watch = FakeWatch()
    scheduler = FakeScheduler(watch=watch)
    log = Log()
    subscription = Subscription(await scheduler.start(), backoff=EAGER)
    running = asyncio.ensure_future(subscription.run(log, has_decisions=False))
    await soon(watch.wait_asked())
    running.cancel()
    await soon(watch.wait_watchers(0))
    await scheduler.stop()
