"""Callers that share turns of the event loop."""

import asyncio

from services.scheduler.loop_turns import LoopTurns, TurnEvent


async def test_each_caller_has_a_turn_of_its_own_in_the_order_of_the_calls() -> None:
    turns, n_turns = LoopTurns(), 0
    taken: list[tuple[str, int]] = []

    def count() -> None:
        nonlocal n_turns
        n_turns += 1
        asyncio.get_running_loop().call_soon(count)

    async def caller(name: str) -> None:
        for _ in range(2):
            await turns.take()
            taken.append((name, n_turns))
            await asyncio.sleep(0)

    count()
    await asyncio.gather(*(caller(name) for name in "abc"))
    assert [name for name, _ in taken] == list("abcabc")
    assert len({turn for _, turn in taken}) == len(taken)


async def test_a_caller_that_no_longer_waits_keeps_no_other_from_its_turn() -> None:
    turns = LoopTurns()
    first, gone, last = (asyncio.ensure_future(turns.take()) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(first, last)
    assert gone.cancelled()


async def test_a_caller_alone_never_waits_for_a_turn_that_has_ended() -> None:
    turns = LoopTurns()
    for _ in range(3):
        taking = asyncio.ensure_future(turns.take())
        await asyncio.sleep(0)
        assert taking.done()


async def test_an_event_for_several_waits_gives_each_a_turn_of_its_own() -> None:
    turns = LoopTurns()
    events = [TurnEvent(turns) for _ in range(3)]
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    for event in events:
        event.set()
    done = []
    while not all(one.done() for one in waiting):
        await asyncio.sleep(0)
        done.append(sum(one.done() for one in waiting))
    assert {1, 2, 3} <= set(done)
