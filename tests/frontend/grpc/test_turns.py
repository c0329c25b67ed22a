"""Turns to receive: who gets one, who waits, and who loses his."""

import asyncio

import pytest

from services.common import errors
from services.frontend.grpc.turns import Turns
from services.frontend.request.refusals import Refusal, Refusals
from tests.limits import HANG_S


class Receiver:
    """A call that takes a turn, and keeps it until it is told to end."""

    def __init__(self, turns: Turns, peer: str = "ipv4:10.0.0.1:1") -> None:
        self.peer = peer
        self.has_turn = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(turns))

    async def _run(self, turns: Turns) -> None:
        async with turns.take(self.peer):
            self.has_turn.set()
            await self.end.wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def cancel(*receivers: Receiver) -> None:
    for receiver in receivers:
        receiver.task.cancel()
    await asyncio.gather(*(receiver.task for receiver in receivers), return_exceptions=True)


async def test_the_newest_who_waits_is_next() -> None:
    turns = Turns(1, Refusals(), hold_s=60)
    first, second, third = (Receiver(turns) for _ in range(3))
    await settled()
    assert [r.has_turn.is_set() for r in (first, second, third)] == [True, False, False]
    first.end.set()
    await settled()
    assert [r.has_turn.is_set() for r in (first, second, third)] == [True, False, True]
    await cancel(second, third)


async def test_one_who_waits_and_goes_takes_no_turn() -> None:
    turns = Turns(1, Refusals(), hold_s=60)
    first, second = Receiver(turns), Receiver(turns)
    await settled()
    await cancel(second)
    first.end.set()
    await settled()
    late = Receiver(turns)
    await settled()
    assert late.has_turn.is_set()
    await cancel(late)


async def test_a_turn_that_lasts_goes_to_one_who_waits() -> None:
    refusals = Refusals()
    turns = Turns(2, refusals, hold_s=0.05)
    slow = [Receiver(turns) for _ in range(2)]
    await settled()
    honest = Receiver(turns)
    async with asyncio.timeout(HANG_S):
        await honest.has_turn.wait()
        with pytest.raises(errors.PoolFull):
            await slow[0].task
    assert not slow[1].task.done(), "one was enough"
    assert refusals[Refusal.MEMORY] == 1
    await cancel(honest, slow[1])


async def test_a_turn_lasts_while_nobody_waits() -> None:
    turns = Turns(1, Refusals(), hold_s=0.01)
    slow = Receiver(turns)
    await asyncio.sleep(0.1)  # longer than it may while others wait
    assert not slow.task.done()
    slow.end.set()
    await asyncio.wait_for(slow.task, HANG_S)


async def test_every_one_of_many_gets_a_turn() -> None:
    turns = Turns(2, Refusals(), hold_s=60)
    many = [Receiver(turns) for _ in range(50)]
    for receiver in many:
        receiver.end.set()
    await asyncio.wait_for(asyncio.gather(*(receiver.task for receiver in many)), HANG_S)


async def test_beyond_the_bound_the_one_that_has_waited_longest_is_refused() -> None:
    turns = Turns(1, Refusals(), hold_s=60, max_waiting=2)
    first, oldest, other, newest = (Receiver(turns) for _ in range(4))
    await settled()
    with pytest.raises(errors.PoolFull):
        await oldest.task
    first.end.set()
    await settled()
    assert newest.has_turn.is_set()
    await cancel(other, newest)


async def test_a_client_that_floods_keeps_no_other_out() -> None:
    turns = Turns(1, Refusals(), hold_s=60, max_waiting=32)
    first = Receiver(turns)
    honest = Receiver(turns, "ipv4:10.0.0.2:1")
    await settled()
    flood = [Receiver(turns) for _ in range(100)]
    await settled()
    assert [receiver.task.done() for receiver in flood] == [True] * 69 + [False] * 31
    late = Receiver(turns, "ipv4:10.0.0.2:1")
    await settled()
    assert flood[69].task.done()
    assert not honest.task.done()
    for receiver in (first, late, honest):
        receiver.end.set()
        await settled()
    assert late.has_turn.is_set()
    assert honest.has_turn.is_set(), "the flood waits longer"
    await cancel(first, late, honest, *flood)


async def test_a_client_that_goes_is_not_told_that_it_is_refused() -> None:
    turns = Turns(1, Refusals(), hold_s=0.0)
    slow = Receiver(turns)
    await settled()
    slow.task.cancel()
    honest = Receiver(turns)
    await settled()
    assert slow.task.cancelled()
    await cancel(honest)


async def test_nobody_keeps_a_turn_for_long_while_others_wait() -> None:
    """Of two who wait, the second is not left to the first who gets a turn."""
    turns = Turns(1, Refusals(), hold_s=0.05)
    first = Receiver(turns)
    await settled()
    second, third = Receiver(turns), Receiver(turns)
    async with asyncio.timeout(HANG_S):
        await third.has_turn.wait()
        await second.has_turn.wait()
    await cancel(first, second, third)
