"""The roll call on real sockets: workers with and without a stage, silent ones, and several."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from services.common import rpc
from services.common.errors import Unavailable
from services.scheduler.cluster.leadership import LeadershipLost
from services.scheduler.cluster.term import Term, Unopposed
from services.scheduler.pipeline.membership import (
    Member,
    Pipeline,
    RollCall,
    check_agreement,
    gather,
)
from tests.fakes import FakeStage, describe_stage, fake_stage, fake_worker

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


async def form(stages: Workers, term: Term | None = None) -> Pipeline:
    term = term or Unopposed()
    return await gather(stages, term=term, pipeline_id="p", timeout_s=LIMIT_S)


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
    monkeypatch.setattr("services.scheduler.pipeline.membership.DESCRIBE_TIMEOUT_S", 2 * LIMIT_S)
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


async def test_a_worker_that_holds_a_stage_and_stops_answering_keeps_it_for_a_while() -> None:
    async with fake_worker() as a, fake_worker() as spare:
        async with fake_worker(loads=False) as b:
            known = workers(2, a, b, spare)
            forming = asyncio.create_task(form(known))
            async with asyncio.timeout(LIMIT_S):
                await b.controller.assignment.wait()
            await asyncio.sleep(0.5)  # long enough to be asked again
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(forming), 2)
        assert spare.controller.assignment.place is None
        forming.cancel()


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
    ("block_size", "n_kv_blocks"), [(0, 8), (4, 0), (4, 2**32 - 1)], ids=["size", "none", "many"]
)
def test_a_stage_whose_memory_cannot_be_accounted_for_is_named(
    block_size: int, n_kv_blocks: int
) -> None:
    stage = describe_stage()
    stage.block_size, stage.n_kv_blocks = block_size, n_kv_blocks
    with pytest.raises(Unavailable, match=f"stage:1 .* {n_kv_blocks} K/V blocks of {block_size}"):
        check_agreement([Member("stage:1", stage)])


@pytest.mark.parametrize("windows", [[5, 0], [0] * 17], ids=["order", "many"])
def test_a_stage_whose_groups_cannot_be_accounted_for_is_named(windows: list[int]) -> None:
    stage = describe_stage()
    stage.kv_windows.extend(windows)
    with pytest.raises(Unavailable, match=r"stage:1 .* the windows of its K/V groups"):
        check_agreement([Member("stage:1", stage)])


def test_stages_of_other_groups_do_not_agree() -> None:
    stages = [describe_stage(0, 2), describe_stage(1, 2)]
    stages[0].kv_windows.extend([0, 7])
    members = [Member("stage:1", stages[0]), Member("stage:2", stages[1])]
    with pytest.raises(Unavailable, match="its kv_windows"):
        check_agreement(members)
    stages[1].kv_windows.extend([0, 7])
    check_agreement(members)
    assert Pipeline("p", 1, tuple(members)).kv_windows == (None, 7)
