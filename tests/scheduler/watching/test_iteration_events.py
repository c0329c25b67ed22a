"""Records of iterations: who rode, what for, and what it brought."""

import pytest
from orcinus.v1 import watch_pb2

from services.scheduler.settings import SchedulerSettings
from tests.scheduler.watching.play import Play, told


async def iterations(play: Play, n: int) -> list[watch_pb2.IterationEvent]:
    """The records of the next iterations."""
    with play.watching.watch() as watcher:
        play.run(n)
        return [event.iteration for event in await told(watcher) if event.HasField("iteration")]


async def test_an_iteration_tells_who_rode_and_how_full_the_memory_was() -> None:
    play = Play(SchedulerSettings(n_stages=1, max_batch_size=4, admission="reserve"))
    play.open()
    play.submit("a", max_new_tokens=2)
    first, second = await iterations(play, 2)
    assert (first.epoch, first.iteration, first.n_in_flight) == (1, 1, 1)
    assert (list(first.numbers), list(first.start_positions), list(first.n_tokens)) == (
        [1],
        [0],
        [3],
    )
    assert list(first.kinds) == [watch_pb2.SPAN_KIND_PREFILL]
    assert (list(first.n_new_tokens), list(first.ended)) == ([1], [])
    assert (first.n_waiting, first.n_running) == (0, 1)
    assert (first.n_reserved_slots, first.n_allocated_slots) == (8, 4)
    assert list(second.kinds) == [watch_pb2.SPAN_KIND_DECODE]
    assert (list(second.start_positions), list(second.ended)) == ([3], [0])
    assert first.round_trip_ns > 0
    assert second.sent_unix_ns > first.sent_unix_ns
    assert [stage.compute_ns for stage in first.stages] == [77]


async def test_an_iteration_is_told_when_the_timings_of_all_stages_are_in() -> None:
    play = Play(SchedulerSettings(n_stages=2, max_batch_size=4))
    play.open()
    with play.watching.watch() as watcher:
        play.submit("a")
        batch = play.send()
        play.time(batch, 0)
        play.give_back(batch)
        assert not any(event.HasField("iteration") for event in await told(watcher))
        play.time(batch, 1, compute_ns=99)
        [event] = [event for event in await told(watcher) if event.HasField("iteration")]
    assert [stage.compute_ns for stage in event.iteration.stages] == [77, 99]


async def test_shared_and_cached_memory_is_told() -> None:
    play = Play()
    play.open()
    prompt = list(range(9))
    play.submit("a", prompt=prompt, max_new_tokens=4)
    play.run(2)
    play.submit("b", prompt=prompt, max_new_tokens=4)
    [shared] = await iterations(play, 1)
    assert shared.n_shared_slots == 8
    assert shared.n_allocated_slots == 16, "shared blocks count once"
    while play.pool.n_running:
        play.run()
    play.submit("c", prompt=[50] * 3)
    [after] = await iterations(play, 1)
    assert after.n_shared_slots == 0
    assert after.n_cached_slots >= 8


@pytest.mark.parametrize("token_id", [5, 6], ids=["right", "wrong"])
async def test_drafts_count_as_tokens_of_the_span_and_bring_new_ones(token_id: int) -> None:
    play = Play(SchedulerSettings(n_stages=2, max_batch_size=4))
    play.open()
    play.submit("a", prompt=[5] * 12, max_new_tokens=20)
    with play.watching.watch() as watcher:
        play.run(1)
        batch = play.send()
        play.give_back(batch, token_id)
        for stage_index in range(2):
            play.time(batch, stage_index)
        record = [e.iteration for e in await told(watcher) if e.HasField("iteration")][-1]
    assert batch.n_drafts == 4
    assert list(record.kinds) == [watch_pb2.SPAN_KIND_DECODE]
    assert list(record.n_tokens) == [5]
    assert list(record.n_new_tokens) == [5 if token_id == 5 else 1]
