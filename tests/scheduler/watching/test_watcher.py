"""One watcher: its messages, and what happens to one that does not read."""

import asyncio

import pytest
from orcinus.v1 import watch_pb2

from services.common.errors import Unavailable
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.watcher import MAX_MESSAGE_BYTES, Watcher


def event(n_bytes: int = 0) -> watch_pb2.WatchEvent:
    return watch_pb2.WatchEvent(request=watch_pb2.RequestEvent(request_id="x" * n_bytes))


def decision() -> watch_pb2.WatchEvent:
    return watch_pb2.WatchEvent(decision=watch_pb2.DecisionEvent(cancellation=1))


async def test_events_of_a_tenth_of_a_second_come_together_and_in_order() -> None:
    audience, watcher = Audience(), Watcher()
    audience.join(watcher)
    audience.tell(event(1))
    reading = asyncio.create_task(watcher.next_message())
    await asyncio.sleep(0)
    audience.tell(event(2))
    message = await reading
    assert [len(one.request.request_id) for one in message.events] == [1, 2]


async def test_a_watcher_that_does_not_keep_up_is_let_go_and_others_are_not() -> None:
    audience = Audience()
    slow, quick = Watcher(max_pending_bytes=3000), Watcher(max_pending_bytes=100_000)
    audience.join(slow)
    audience.join(quick)
    for _ in range(4):
        audience.tell(event(900))
    assert audience.is_there
    assert len((await quick.next_message()).events) == 4
    with pytest.raises(Unavailable, match="does not keep up"):
        await slow.next_message()
    audience.leave(quick)
    assert not audience.is_there


async def test_much_comes_in_several_messages() -> None:
    watcher = Watcher()
    for _ in range(3):
        watcher.put(event(), MAX_MESSAGE_BYTES)
    assert [len((await watcher.next_message()).events) for _ in range(3)] == [1, 1, 1]


async def test_what_waits_at_the_end_still_goes_out() -> None:
    audience, watcher = Audience(), Watcher()
    audience.join(watcher)
    audience.tell(event())
    audience.end("this scheduler no longer leads")
    audience.tell(event())
    assert len((await watcher.next_message()).events) == 1
    with pytest.raises(Unavailable, match="no longer leads"):
        await watcher.next_message()


async def test_decisions_are_for_those_who_want_them() -> None:
    audience = Audience()
    plain, whole = Watcher(), Watcher(has_decisions=True)
    audience.join(plain)
    assert not audience.wants_decisions
    audience.join(whole)
    assert audience.wants_decisions
    audience.tell(decision())
    audience.tell(event())
    assert len((await plain.next_message()).events) == 1
    assert len((await whole.next_message()).events) == 2
