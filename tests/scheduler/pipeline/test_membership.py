"""The roll call on real sockets: workers with and without a stage, silent ones, and several."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from orcinus.v1 import worker_pb2

from services.common import rpc
from services.common.errors import TimedOut, Unavailable
from services.scheduler.cluster.leadership import LeadershipLost
from services.scheduler.cluster.term import Term, Unopposed
from services.scheduler.pipeline.membership import (
    LastPipeline,
    Member,
    OnShortfall,
    Pipeline,
    RollCall,
    check_layers,
)
from services.scheduler.pipeline.shortfall import Shortfall
from tests.fakes import FakeStage, describe_stage, fake_stage, fake_worker
from tests.gathering import gather

LIMIT_S = 30


@dataclass
class Workers:
    """A directory that a test fills."""

    n_stages: int
    known: list[str] = field(default_factory=list)

    def addresses(self) -> list[str]:
        return list(self.known)


def workers(n_stages: int, *known: FakeStage) -> Workers:
    return Workers(n_stages, [worker.address for worker in known])


async def form(
    stages: Workers, term: Term | None = None, on_shortfall: OnShortfall = lambda _: None
) -> Pipeline:
    return await gather(
        stages,
        term=term or Unopposed(),
        pipeline_id="p",
        timeout_s=LIMIT_S,
        on_shortfall=on_shortfall,
    )


def members(pipeline: Pipeline) -> list[str]:
    return [member.address for member in pipeline.members]


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """The address of a host that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "{}:{}".format(*listener.getsockname())


async def test_free_workers_become_the_stages_and_one_more_is_a_spare() -> None:
    async with fake_worker() as a, fake_worker() as b, fake_worker() as c:
        pipeline = await form(workers(2, a, b, c))
        assert members(pipeline) == [a.address, b.address]
        assert [it.description.stage_index for it in pipeline.members] == [0, 1]
        assert c.controller.assignment.place is None
        assert pipeline.epoch > a.controller.epoch.number, "the stages can join"


async def test_a_spare_takes_the_stage_of_one_that_is_gone_and_the_others_keep_theirs() -> None:
    async with fake_worker() as a, fake_worker() as spare:
        async with fake_worker() as b:
            term = Unopposed()
            await form(workers(2, a, b), term)
        pipeline = await form(workers(2, a, b, spare), term)  # its pod is still known
        assert members(pipeline) == [a.address, spare.address]


@pytest.mark.parametrize("is_same_process", [True, False])
async def test_a_worker_that_was_taken_for_lost_too_soon_is_noticed(is_same_process: bool) -> None:
    n_returned = 0

    def note_return() -> None:
        nonlocal n_returned
        n_returned += 1

    async with fake_worker() as worker:
        pipeline = await form(workers(1, worker))
        if not is_same_process:
            pipeline.first.process = "the process before"
        call = RollCall(workers(1, worker), Unopposed(), rpc.connect, on_return=note_return)
        call.note_lost(LastPipeline(pipeline.members, gone=0))
        async with asyncio.timeout(LIMIT_S):
            await call.until_complete()
        await call.close()
    assert n_returned == is_same_process


async def test_a_worker_that_comes_later_is_assigned_what_is_missing() -> None:
    async with fake_worker() as a, fake_worker() as b:
        known = workers(2, a)
        forming = asyncio.create_task(form(known))
        async with asyncio.timeout(LIMIT_S):
            await a.controller.assignment.wait()
        known.known.insert(0, b.address)
        assert members(await forming) == [a.address, b.address]


async def test_a_silent_worker_holds_up_nobody_who_can_do_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.pipeline.asked_worker.DESCRIBE_TIMEOUT_S", 2 * LIMIT_S)
    async with fake_stage(0, 2) as first, fake_stage(1, 2) as second, silent() as lost:
        known = workers(2, first, second)
        known.known.insert(0, lost)
        async with asyncio.timeout(LIMIT_S):
            assert members(await form(known)) == [first.address, second.address]


async def test_the_stage_of_a_silent_worker_is_assigned_to_a_free_one() -> None:
    async with fake_stage(0, 2) as first, fake_worker() as spare, silent() as lost:
        known = workers(2, first, spare)
        known.known.append(lost)
        assert members(await form(known)) == [first.address, spare.address]


async def test_a_worker_that_holds_a_stage_and_falls_silent_keeps_it_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.pipeline.asked_worker.DESCRIBE_TIMEOUT_S", 0.5)
    async with fake_worker() as a, fake_worker(loads=False) as b, fake_worker() as spare:
        call = RollCall(workers(2, a, b, spare), Unopposed(), rpc.connect)
        calling = asyncio.create_task(call.until_complete())
        async with asyncio.timeout(LIMIT_S):
            await b.controller.assignment.wait()
            fall_silent(b)
            while "there is no worker for stage 1" not in call.trouble:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # long enough for an assignment
        assert spare.controller.assignment.place is None
        calling.cancel()
        await call.close()


def fall_silent(worker: FakeStage) -> None:
    """Makes a worker whose port stays open answer no question in time."""

    def describe() -> worker_pb2.DescribeResponse:
        raise TimedOut("it does not answer")

    worker.controller.describe = describe  # type: ignore[method-assign]


async def test_the_stage_of_a_process_that_has_ended_is_assigned_to_a_spare_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.pipeline.asked_worker.CLAIM_S", 2 * LIMIT_S)
    async with fake_worker() as a, fake_worker() as spare:
        async with fake_worker(loads=False) as b:
            forming = asyncio.create_task(form(workers(2, a, b, spare)))
            async with asyncio.timeout(LIMIT_S):
                await b.controller.assignment.wait()
            await asyncio.sleep(0.5)  # long enough to be asked again
        async with asyncio.timeout(LIMIT_S):
            assert members(await forming) == [a.address, spare.address]


async def test_the_stage_of_a_worker_whose_connection_broke_is_assigned_without_a_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.pipeline.asked_worker.DESCRIBE_TIMEOUT_S", 2 * LIMIT_S)
    async with fake_stage(0, 2) as first, fake_worker() as spare, silent() as lost:
        description = describe_stage(1, 2)
        members_before = (Member(first.address, describe_stage(0, 2)), Member(lost, description))
        known = Workers(2, [lost, first.address, spare.address])
        call = RollCall(known, Unopposed(), rpc.connect)
        call.note_lost(LastPipeline(members_before, gone=1))
        async with asyncio.timeout(LIMIT_S):
            found = await call.until_complete()
        assert [member.address for member in found] == [first.address, spare.address]
        await call.close()


async def test_a_member_of_the_last_pipeline_that_is_only_busy_keeps_its_stage_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.pipeline.asked_worker.DESCRIBE_TIMEOUT_S", 0.2)
    async with fake_stage(0, 2) as first, fake_worker() as spare, silent() as busy:
        before = (Member(first.address, describe_stage(0, 2)), Member(busy, describe_stage(1, 2)))
        known = Workers(2, [busy, first.address, spare.address])
        call = RollCall(known, Unopposed(), rpc.connect)
        call.note_lost(LastPipeline(before))
        calling = asyncio.create_task(call.until_complete())
        async with asyncio.timeout(LIMIT_S):
            while f"worker at {busy}" not in call.trouble:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # long enough for an assignment
        assert spare.controller.assignment.place is None
        calling.cancel()
        await call.close()


async def test_an_odd_worker_waits_while_the_member_before_it_may_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_worker(block_size=8) as odd:
        async with fake_worker() as good:
            last = LastPipeline((await form(workers(1, good))).members)
        call = RollCall(workers(1, good, odd), Unopposed(), rpc.connect)
        call.note_lost(last)
        calling = asyncio.create_task(call.until_complete())
        async with asyncio.timeout(LIMIT_S):
            while "does not fit: block_size 8, not 4" not in call.trouble:
                await asyncio.sleep(0.01)
        assert odd.controller.assignment.place is None
        calling.cancel()
        await call.close()


async def test_two_that_do_not_fit_are_both_named_and_the_next_one_decides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_worker(block_size=8) as odd, fake_worker() as good, fake_worker() as late:
        known = workers(2, odd)
        told: list[Shortfall] = []
        forming = asyncio.create_task(
            gather(
                known,
                term=Unopposed(),
                pipeline_id="p",
                timeout_s=LIMIT_S,
                on_shortfall=told.append,
            )
        )
        async with asyncio.timeout(LIMIT_S):
            await odd.controller.assignment.wait()  # it came first and holds stage 0
            known.known.append(good.address)
            while not (told and len(told[-1].unfit) == 2):
                await asyncio.sleep(0.01)
            for worker, says in ((odd, "block_size 8, not 4"), (good, "block_size 4, not 8")):
                text = f"{worker.controller.name} does not fit: {says}"
                assert text in told[-1].for_clients
                assert f"worker {worker.controller.name} at {worker.address}" in caplog.text
                assert worker.address not in told[-1].for_clients
            known.known.append(late.address)
            assert members(await forming) == [good.address, late.address]
        assert [worker.address for worker in told[-1].unfit] == [odd.address]
        assert not told[-1].missing


async def test_two_that_hold_one_stage_are_a_member_and_a_spare() -> None:
    async with fake_stage(0, 2) as first, fake_stage(1, 2) as a, fake_stage(1, 2) as b:
        pipeline = await form(workers(2, b, first, a))
        assert members(pipeline) in ([first.address, a.address], [first.address, b.address])


async def test_a_worker_that_another_one_makes_superfluous_is_recalled() -> None:
    async with fake_worker() as a, fake_worker() as b:
        for worker in (a, b):
            await form(workers(1, worker))
        known = workers(1, a, b)
        known.n_stages = 2
        forming = asyncio.create_task(form(known))
        recalled = [
            asyncio.create_task(it.controller.assignment.is_recalled.wait()) for it in (a, b)
        ]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait(recalled, return_when=asyncio.FIRST_COMPLETED)
        forming.cancel()


class Deposed:
    """The term of a leader that does not know yet that it leads no more."""

    async def next_epoch(self, seen: int) -> int:
        return 3


class Ended:
    """The term of a leader that knows."""

    async def next_epoch(self, seen: int) -> int:
        raise LeadershipLost("it is another's turn")


async def test_a_deposed_leader_assigns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fake_worker() as worker:
        worker.controller.epoch.claim(5)  # the word of a later leader
        call = RollCall(workers(1, worker), Deposed(), rpc.connect)
        calling = asyncio.create_task(call.until_complete())
        async with asyncio.timeout(LIMIT_S):
            while "epoch 3 is not newer than epoch 5" not in caplog.text:
                await asyncio.sleep(0.01)
        assert not calling.done()
        assert worker.controller.assignment.place is None
        calling.cancel()
        await call.close()


async def test_a_leader_that_is_deposed_while_it_assigns_says_so() -> None:
    async with fake_worker() as worker:
        with pytest.raises(LeadershipLost):
            await form(workers(1, worker), Ended())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_worker_that_cannot_be_reached_is_named_with_its_address(host: str) -> None:
    stages = Workers(1, [f"{host}:9"])
    with pytest.raises(Unavailable, match=rf"worker at {re.escape(host)}:9: .*refused"):
        await gather(stages, term=Unopposed(), pipeline_id="p", timeout_s=2.0)


async def test_stages_that_nobody_holds_are_named() -> None:
    async with fake_stage(1, 3, loads=False) as loading:
        missing = "weights are loaded on stage 1; there is no worker for stage 0, 2"
        call = RollCall(workers(3, loading), Unopposed(), rpc.connect)
        calling = asyncio.create_task(call.until_complete())
        async with asyncio.timeout(LIMIT_S):
            while call.trouble != missing:
                await asyncio.sleep(0.01)
        calling.cancel()
        await call.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first_layer": 1}, "stage 1 at b begins with layer 1, .* up to a, there are 2 layers"),
        ({"kv_windows": [0, 7]}, r"\[\] at a and \[0, 7\] at b"),
    ],
    ids=["layers", "windows"],
)
def test_stages_that_do_not_follow_each_other_are_both_named(
    change: dict[str, Any], said: str
) -> None:
    stages = [describe_stage(0, 2), describe_stage(1, 2)]
    check_layers([Member("a", stages[0]), Member("b", stages[1])])
    stages[1].MergeFrom(worker_pb2.DescribeResponse(**change))
    with pytest.raises(Unavailable, match=said):
        check_layers([Member("a", stages[0]), Member("b", stages[1])])


def test_the_windows_of_a_pipeline_are_those_of_its_stages() -> None:
    stage = describe_stage()
    stage.kv_windows.extend([0, 7])
    assert Pipeline("p", 1, (Member("a", stage),)).kv_windows == (None, 7)
