"""What a watch tells: first what there is, then what happens, across epochs."""

import asyncio
from typing import Literal

import pytest
from orcinus.v1 import scheduler_pb2, watch_pb2

from services.common.watch_json import to_json
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.pipeline.shortfall import UnfitWorker
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.watcher import Watcher
from services.scheduler.watching.watching import Watching
from tests.limits import HANG_S
from tests.scheduler.watching.play import Play, kinds, told


async def pools_until(watcher: Watcher, n_generated: int) -> list[watch_pb2.PoolEvent]:
    """What is told of the pool, until the first of it has so many tokens."""
    pools: list[watch_pb2.PoolEvent] = []
    while not pools or list(pools[-1].n_generated_tokens) != [n_generated]:
        events = await asyncio.wait_for(told(watcher), HANG_S)
        pools += [event.pool for event in events if event.HasField("pool")]
    return pools


async def test_a_watch_begins_with_the_epoch_the_requests_and_the_pool() -> None:
    play = Play()
    play.open()
    play.submit("a", max_new_tokens=9, priority=-1)
    play.send()
    play.submit("b", account=AccountUse(AccountLimits(weight=2.0), name="k"))
    with play.watching.watch() as watcher:
        epoch, first, second, pool = await told(watcher)
    assert to_json(epoch)["epoch"] == 1
    assert (epoch.epoch.model, epoch.epoch.n_stages, epoch.epoch.n_slots) == ("fake", 1, 200)
    assert (epoch.epoch.policy, epoch.epoch.order, epoch.epoch.max_batch_tokens) == (
        "chunked",
        "fair",
        512,
    )
    assert {key: value for key, value in to_json(first).items() if key != "t"} == {
        "type": "request",
        "number": 2,
        "turn": "waiting",
        "request_id": "b",
        "n_prompt_tokens": 3,
        "max_new_tokens": 4,
        "account": "k",
    } | {"number": first.request.number}
    assert second.request.turn == watch_pb2.REQUEST_TURN_ADMITTED
    assert (second.request.request_id, second.request.priority) == ("a", -1)
    assert list(pool.pool.waiting) == [first.request.number]
    assert list(pool.pool.running) == [second.request.number]
    accounts = {one.account: one for one in pool.pool.accounts}
    assert accounts["k"].weight == 2
    assert (accounts["k"].n_waiting, accounts["k"].n_running) == (1, 0)
    assert accounts[""].counter == 3, "its prompt was charged"


async def test_a_watch_that_begins_before_the_first_epoch_is_told_of_it() -> None:
    play = Play()
    with play.watching.watch() as watcher:
        play.open()
        assert kinds(await told(watcher)) == ["epoch", "pool"]


async def test_an_epoch_is_told_when_it_serves_and_not_when_it_forms() -> None:
    play = Play()
    play.form()
    with play.watching.watch() as watcher:
        assert watcher.n_pending == 0
        play.lose("the pipeline did not form: a stage does not report")
        play.open()
        assert kinds(await told(watcher)) == ["epoch", "pool"]
        play.form()
        with play.watching.watch() as other:
            first, *_ = await told(other)
    assert first.epoch.epoch == 2, "the last that served"


async def test_a_request_is_told_from_waiting_to_its_end() -> None:
    play = Play()
    play.open()
    with play.watching.watch() as watcher:
        play.submit("a", max_new_tokens=1)
        play.run()
        turns = [e.request for e in await told(watcher) if e.HasField("request")]
    assert [turn.turn for turn in turns] == [
        watch_pb2.REQUEST_TURN_WAITING,
        watch_pb2.REQUEST_TURN_ADMITTED,
        watch_pb2.REQUEST_TURN_ENDED,
    ]
    assert len({turn.number for turn in turns}) == 1
    assert turns[0].request_id == "a"
    assert turns[2].reason == scheduler_pb2.COMPLETION_REASON_LENGTH
    assert turns[2].n_generated_tokens == 1


async def test_a_loss_is_marked_without_addresses_and_the_watch_goes_on() -> None:
    play = Play()
    play.open()
    with play.watching.watch() as watcher:
        play.submit("a", max_new_tokens=9)
        play.run(3)
        play.send()
        play.lose()
        play.open()
        play.run()
        events = await told(watcher)
    lost, suspects = [event.mark for event in events if event.HasField("mark")]
    assert (lost.kind, lost.text, lost.epoch) == (watch_pb2.MARK_KIND_LOST, "stage 0 is gone", 1)
    assert suspects.kind == watch_pb2.MARK_KIND_SUSPECTS
    assert list(suspects.numbers) == list(lost.numbers) == [1]
    turns = [event.request.turn for event in events if event.HasField("request")]
    assert turns[-2:] == [watch_pb2.REQUEST_TURN_SUSPENDED, watch_pb2.REQUEST_TURN_ADMITTED]
    assert [event.epoch.epoch for event in events if event.HasField("epoch")] == [1, 2]
    last = [event.iteration for event in events if event.HasField("iteration")][-1]
    assert (last.epoch, last.iteration) == (2, 1)
    assert list(last.kinds) == [watch_pb2.SPAN_KIND_RECOMPUTATION]


@pytest.mark.parametrize("order", ["fcfs", "fair"])
async def test_the_pool_is_told_four_times_a_second_at_most_and_if_it_changed(
    order: Literal["fcfs", "fair"],
) -> None:
    play = Play(SchedulerSettings(n_stages=1, order=order, max_batch_size=1, speculative_tokens=0))
    play.open()
    with play.watching.watch() as watcher:
        for name in "abc":
            play.submit(name, max_new_tokens=50)
        started = asyncio.get_running_loop().time()
        for _ in range(40):
            play.run()
            await asyncio.sleep(0.01)
        pools = await pools_until(watcher, 40)
        took_s = asyncio.get_running_loop().time() - started
    assert 2 <= len(pools) <= 3 + took_s / 0.25, "one with which the watch began, and one at once"
    assert list(pools[-1].running) == [1]
    assert list(pools[-1].waiting) == [2, 3]
    assert bool(pools[-1].accounts) == (order == "fair")


async def test_draining_is_marked() -> None:
    play = Play()
    play.open()
    with play.watching.watch() as watcher:
        await told(watcher)
        play.watching.drain()
        [event] = await told(watcher)
    assert event.mark.kind == watch_pb2.MARK_KIND_DRAINING


async def test_nothing_is_made_while_nobody_watches() -> None:
    play = Play()
    with play.watching.watch():
        pass
    play.open()
    play.submit("a", max_new_tokens=9)
    batch = play.send()
    assert play.epoch._iterations.n_pending == 0
    assert len(play.watching._told) == 0
    with play.watching.watch() as watcher:
        play.give_back(batch)
        play.time(batch)
        seen = kinds(await told(watcher))
        assert seen[:3] == ["epoch", "request", "pool"]
        assert "iteration" not in seen, "it began before"
    play.run(3)
    play.lose()
    assert play.watching._pool._timer is None
    assert play.epoch._iterations.n_pending == 0


async def test_numbers_are_kept_while_a_request_lives_and_never_given_again() -> None:
    play = Play()
    play.open()
    play.submit("a", max_new_tokens=2)
    seen = []
    for _ in range(2):
        with play.watching.watch() as watcher:
            [request] = [
                event.request for event in await told(watcher) if event.HasField("request")
            ]
            seen.append(request.number)
    play.run(2)
    play.submit("b")
    with play.watching.watch() as watcher:
        [request] = [event.request for event in await told(watcher) if event.HasField("request")]
    assert seen == [1, 1]
    assert request.number == 2


def test_ends_without_a_watch_leave_nothing() -> None:
    watching = Watching(SchedulerSettings(n_stages=1))
    watching.drain()
    watching.end("over")


async def test_workers_that_do_not_fit_are_told_once_and_to_whoever_comes_later() -> None:
    play = Play()
    odd, good = (
        UnfitWorker(f"10.0.0.{size}:1", f"pod-{size}", f"block_size {size}") for size in (16, 32)
    )
    with play.watching.watch() as watcher:
        play.watching.note_unfit((odd,))
        play.watching.note_unfit((odd, good))
        marks = [event.mark for event in await told(watcher)]
    assert {mark.kind for mark in marks} == {watch_pb2.MARK_KIND_UNFIT}
    texts = ["pod-16 does not fit: block_size 16", "pod-32 does not fit: block_size 32"]
    assert [mark.text for mark in marks] == texts
    play.open()
    play.watching.note_unfit((odd,))
    with play.watching.watch() as watcher:
        first, *_, last = await told(watcher)
    assert first.HasField("epoch")
    assert last.mark.text == texts[0]


async def test_a_watch_is_told_the_epochs_of_all_pipelines_that_serve() -> None:
    first = Play(SchedulerSettings(n_stages=1, max_batch_size=1))
    second = first.beside(3)
    first.open()
    with first.watching.watch() as early:
        second.open()
        assert [event.epoch.pipeline for event in await told(early) if event.HasField("epoch")] == [
            0,
            3,
        ]
    for name in "abc":
        first.submit(name, max_new_tokens=9)
    first.send()
    second.send()
    with first.watching.watch() as watcher:
        one, other, *requests, pool = await told(watcher)
    assert [(e.epoch.pipeline, e.epoch.epoch) for e in (one, other)] == [(0, 1), (3, 2)]
    turns = {e.request.request_id: (e.request.turn, e.request.pipeline) for e in requests}
    assert turns == {
        "a": (watch_pb2.REQUEST_TURN_ADMITTED, 0),
        "b": (watch_pb2.REQUEST_TURN_ADMITTED, 3),
        "c": (watch_pb2.REQUEST_TURN_WAITING, 0),
    }
    numbers = {e.request.request_id: e.request.number for e in requests}
    assert list(pool.pool.running) == [numbers["a"], numbers["b"]]
    assert list(pool.pool.pipelines) == [0, 3]
    assert list(pool.pool.waiting) == [numbers["c"]]


async def test_the_loss_of_one_pipeline_ends_no_other() -> None:
    first = Play(SchedulerSettings(n_stages=1, max_batch_size=2))
    second = first.beside(1)
    first.open()
    second.open()
    request = first.submit("a", max_new_tokens=9)
    with first.watching.watch() as watcher:
        first.run(2)
        first.lose()
        second.run()
        events = await told(watcher)
        with first.watching.watch() as later:
            epochs = [e.epoch.epoch for e in await told(later) if e.HasField("epoch")]
        assert epochs == [2], "the other one serves"
    [lost] = [event.mark for event in events if event.HasField("mark")]
    assert (lost.kind, lost.epoch) == (watch_pb2.MARK_KIND_LOST, 1)
    turns = [(e.request.turn, e.request.pipeline) for e in events if e.HasField("request")]
    assert turns[-2:] == [
        (watch_pb2.REQUEST_TURN_SUSPENDED, 0),
        (watch_pb2.REQUEST_TURN_ADMITTED, 1),
    ]
    last = [event.iteration for event in events if event.HasField("iteration")][-1]
    assert (last.epoch, last.pipeline) == (2, 1)
    assert list(last.kinds) == [watch_pb2.SPAN_KIND_RECOMPUTATION]
    assert request in second.pool.running


async def test_a_pipeline_that_leaves_the_others_is_marked_and_the_last_one_is_not() -> None:
    first = Play()
    second = first.beside(1)
    first.open()
    second.open()
    with first.watching.watch() as watcher:
        second.leave()
        first.leave()
        marks = [event.mark for event in await told(watcher) if event.HasField("mark")]
    assert [(mark.kind, mark.epoch) for mark in marks] == [(watch_pb2.MARK_KIND_LEFT, 2)]
    with first.watching.watch() as watcher:
        event, *_ = await told(watcher)
    assert event.epoch.epoch == 2, "the one that began to serve last"
