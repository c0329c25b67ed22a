"""A leader with several pipelines, on real controllers with fake ranks."""

import asyncio
import contextlib
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from orcinus.v1 import scheduler_pb2

from services.common.errors import Unavailable
from services.scheduler.cluster.term import Unopposed
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.fleet import Fleet
from services.scheduler.leader import Leader
from services.scheduler.observing.request_observer import RequestObservers
from services.scheduler.pipeline import forming, joining
from services.scheduler.pipeline.asked_worker import AskedWorker
from services.scheduler.pipeline.fit import build_of, traits_of
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import PipelinePlace
from tests.exposition import Samples
from tests.fakes import FakeStage, fake_stage, fake_worker
from tests.limits import HANG_S
from tests.scheduler.leading import LIMIT_S, MovingStages, Scene, scene


async def until(condition: object, *, pause_s: float = 0.01) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(pause_s)


def joined(*stages: FakeStage) -> list[int]:
    """Returns the epochs that stages are in."""
    return [stage.controller.describe().epoch for stage in stages]


async def formed(it: Scene, count: int) -> None:
    """Waits until as many pipelines have formed, lost ones included."""
    # All metrics are written out and read each time, which takes some milliseconds.
    await until(
        lambda: Samples.of(it.registry).sum("orcinus_epochs_formed_total") == count, pause_s=0.1
    )


@contextlib.asynccontextmanager
async def two_pipelines(
    *, hang_limit_s: float = 9.0
) -> AsyncIterator[tuple[Scene, FakeStage, FakeStage]]:
    """A leader that serves with two pipelines of one stage each."""
    async with (
        scene(1, hang_limit_s=hang_limit_s) as it,
        fake_stage() as first,
        fake_stage() as second,
    ):
        it.stages.add(first.address, second.address)
        await it.until_open()
        await formed(it, 2)
        async with beating(first, second):
            yield it, first, second


@contextlib.asynccontextmanager
async def beating(*stages: FakeStage) -> AsyncIterator[None]:
    """Sends the heartbeats of stages, which show that a stage that is late is not silent."""

    async def beat() -> None:
        while True:
            for one in stages:
                left_ms = one.controller.departure.left_ms
                one.controller.reports.publish_heartbeat(leaves_in_ms=left_ms)
            await asyncio.sleep(0.05)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()


async def submitted(it: Scene, *names: str, n_tokens: int = 3) -> None:
    for name in names:
        await it.submit(name, n_tokens=n_tokens)


async def test_as_many_pipelines_form_as_there_are_workers_for() -> None:
    async with (
        scene(2) as it,
        fake_worker(answers=True) as a,
        fake_worker(answers=True) as b,
        fake_worker(answers=True) as c,
        fake_worker(answers=True) as d,
        fake_worker(answers=True) as spare,
    ):
        workers = (a, b, c, d)
        it.stages.add(*(one.address for one in workers))
        await it.until_open()
        await formed(it, 2)
        it.stages.add(spare.address)
        assert len(set(joined(*workers))) == 2
        places = [one.controller.assignment.place for one in workers]
        assert sorted(place.stage_index for place in places if place) == [0, 0, 1, 1]
        await submitted(it, "a", "b")
        assert (await it.ends(2)).keys() == {"a", "b"}
        assert spare.controller.assignment.place is None


async def test_requests_spread_and_go_on_in_another_pipeline_when_theirs_is_lost() -> None:
    async with two_pipelines() as (it, first, second):
        await submitted(it, "a", "b")
        await until(lambda: first.rank.plans and second.rank.plans)
        lost, other = first, second
        lost.controller.on_exit(0, -signal.SIGKILL)
        [suspension] = (await until_suspended(it)).suspended
        assert suspension.n_losses == 1
        n_plans = len(other.rank.plans)
        other.rank.answers = True
        for plan in list(other.rank.plans):
            other.rank.answer(plan)
        reason = scheduler_pb2.COMPLETION_REASON_LENGTH
        assert await it.ends(2) == {"a": reason, "b": reason}
        assert len(other.rank.plans) > n_plans
        counted = Samples.of(it.registry)
        assert counted.sum("orcinus_requests_suspended_total") == 1
        assert counted.sum("orcinus_requests_resumed_total") == 1


async def until_suspended(it: Scene) -> scheduler_pb2.ConnectResponse:
    """Returns the message that tells of a suspended request; frontends are never told that the
    scheduler takes no requests."""
    while True:
        message = await it.read()
        assert not message.is_closed
        if message.suspended:
            return message


async def first_tokens(*stages: FakeStage) -> None:
    """Lets each stage answer its first plan, so that the usual time of an iteration is known, and
    waits for its second plan."""
    await until(lambda: all(stage.rank.plans for stage in stages))
    for stage in stages:
        stage.rank.answer(stage.rank.plans[0])
    await until(lambda: all(len(stage.rank.plans) > 1 for stage in stages))


def answer_all(stage: FakeStage, *, after: int) -> None:
    """Lets a stage answer all plans except the first ones, and further plans at once."""
    stage.rank.answers = True
    for plan in list(stage.rank.plans[after:]):
        stage.rank.answer(plan)


async def tokens_until_ends(it: Scene, count: int) -> dict[str, list[int]]:
    """Returns the positions of all tokens that come, by request, until `count` requests end."""
    positions: defaultdict[str, list[int]] = defaultdict(list)
    n_ends = 0
    while n_ends < count:
        message = await it.read()
        n_ends += len(message.completed)
        for update in message.tokens:
            positions[update.request_id] += range(
                update.start, update.start + len(update.token_ids)
            )
    return dict(positions)


async def test_late_pipeline_keeps_its_epoch_while_its_request_goes_on_elsewhere() -> None:
    async with two_pipelines() as (it, late, other):
        await submitted(it, "a", "b")
        await first_tokens(late, other)
        epochs = joined(late, other)
        answer_all(other, after=1)
        positions = await tokens_until_ends(it, 2)
        assert positions == {"a": [0, 1, 2], "b": [0, 1, 2]}
        counted = Samples.of(it.registry)
        assert counted.sum("orcinus_pipelines_late_total") == 1
        assert counted.sum("orcinus_requests_moved_total") == 1
        assert counted.sum("orcinus_requests_suspected_total") == 0
        n_plans = len(late.rank.plans)
        await submitted(it, "c")
        await it.ends(1)
        assert len(late.rank.plans) == n_plans, "a late pipeline gets no requests"
        answer_all(late, after=1)
        async with asyncio.timeout(LIMIT_S):
            while len(late.rank.plans) == n_plans:  # until its late result has come
                await submitted(it, "d", "e")
                assert await tokens_until_ends(it, 2) == {"d": [0, 1, 2], "e": [0, 1, 2]}
        assert joined(late, other) == epochs
        assert Samples.of(it.registry).sum("orcinus_pipeline_losses_total") == 0


async def test_tokens_that_come_too_late_are_delivered_once() -> None:
    async with two_pipelines() as (it, late, other):
        await submitted(it, "a", "b")
        await first_tokens(late, other)
        await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines_late_total") == 1)
        for stage in (late, other):
            answer_all(stage, after=1)
        assert await tokens_until_ends(it, 2) == {"a": [0, 1, 2], "b": [0, 1, 2]}


async def test_pipeline_that_stays_late_is_given_up_in_the_end() -> None:
    async with two_pipelines(hang_limit_s=1.5) as (it, late, other):
        await submitted(it, "a", "b")
        await first_tokens(late, other)
        answer_all(other, after=1)
        assert (await it.ends(2)).keys() == {"a", "b"}
        await formed(it, 3)
        counted = Samples.of(it.registry)
        assert counted.sum("orcinus_pipelines_late_total") == 1
        assert counted.sum("orcinus_pipeline_losses_total") == 1
        assert counted.sum("orcinus_requests_suspected_total") == 0


async def test_lost_pipeline_forms_again_beside_the_one_that_serves() -> None:
    async with scene(1) as it, fake_stage(answers=True) as kept:
        it.stages.add(kept.address)
        async with fake_stage() as lost:
            it.stages.add(lost.address)
            await formed(it, 2)
            it.stages.remove(lost.address)
            lost.controller.on_exit(0, -signal.SIGKILL)
        async with fake_stage(answers=True) as replacement:
            it.stages.add(replacement.address)
            await formed(it, 3)
            assert joined(kept) < joined(replacement)
            await submitted(it, "a", "b")
            assert (await it.ends(2)).keys() == {"a", "b"}
            assert replacement.rank.plans
            assert kept.rank.plans


async def test_all_pipelines_finish_their_requests_when_the_leader_is_told_to_stop() -> None:
    async with two_pipelines() as (it, first, second):
        await submitted(it, "a", "b", n_tokens=1)
        await until(lambda: first.rank.plans and second.rank.plans)
        it.stop.set()
        assert await it.until_closed() == []
        for stage in (first, second):
            stage.rank.answer(stage.rank.plans[0])
        assert (await it.ends(2)).keys() == {"a", "b"}
        await asyncio.wait_for(asyncio.shield(it.leading), LIMIT_S)


async def test_pipeline_forms_beside_one_whose_pod_has_left_the_directory() -> None:
    async with scene(1) as it, fake_stage(answers=True) as ending, fake_stage() as coming:
        it.stages.add(ending.address)
        await formed(it, 1)
        it.stages.remove(ending.address)
        it.stages.add(coming.address)
        await formed(it, 2)


async def test_workers_of_a_pipeline_that_serves_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counter[str] = Counter()
    ask = AskedWorker._take

    def take(worker: AskedWorker, *args: Any) -> None:
        asked[worker.address] += 1
        ask(worker, *args)

    monkeypatch.setattr(AskedWorker, "_take", take)
    async with scene(1) as it, fake_stage(answers=True) as stage:
        it.stages.add(stage.address)
        await it.until_open()
        n_asked = asked[stage.address]
        await asyncio.sleep(0.5)  # long enough to be asked again
        assert asked[stage.address] == n_asked


async def test_worker_that_is_known_by_two_addresses_is_in_one_pipeline_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene(1) as it, fake_stage(answers=True) as stage:
        again = stage.address.replace("127.0.0.1", "localhost")
        it.stages.add(stage.address, again)
        await formed(it, 1)
        epochs = joined(stage)
        await until(lambda: "it is known by another address, too" in caplog.text)
        async with fake_stage(answers=True) as other:
            it.stages.add(other.address)
            await formed(it, 2)
            await submitted(it, "a", "b")
            assert (await it.ends(2)).keys() == {"a", "b"}
        assert joined(stage) == epochs


async def test_stage_that_does_not_join_is_named_and_other_pipelines_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "SLOW_JOIN_S", 0.2)
    async with scene(1) as it, fake_stage(answers=True) as stage, fake_stage() as stuck:
        it.stages.add(stage.address)
        await formed(it, 1)
        stuck.rank.joins = False
        it.stages.add(stuck.address)
        await until(lambda: f"does not form: stage 0 at {stuck.address}" in caplog.text)
        assert Samples.of(it.registry).sum("orcinus_pipelines_forming") == 1
        await submitted(it, "a", "b")
        assert (await it.ends(2)).keys() == {"a", "b"}


async def test_pipelines_that_never_join_use_up_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forming, "JOIN_TIMEOUT_S", 0.5)
    stages, requests = MovingStages(1), RequestObservers()
    settings = SchedulerSettings(n_stages=1, start_timeout_s=1)
    leader = Leader(settings, stages, SchedulerService(requests), requests=requests)
    async with fake_stage() as first, fake_stage() as second:
        for stage in (first, second):
            stage.controller.on_exit(0, -signal.SIGKILL)
            stages.add(stage.address)
        with pytest.raises(Unavailable, match=r"no pipeline within 1 s: .*exited with status -9"):
            await asyncio.wait_for(leader.lead(Unopposed(), asyncio.Event()), LIMIT_S)


async def test_requests_of_a_worker_that_leaves_move_and_no_pipeline_is_lost() -> None:
    async with two_pipelines() as (it, first, second):
        await submitted(it, "a", "b", n_tokens=20)
        await until(lambda: first.rank.plans and second.rank.plans)
        departing = asyncio.create_task(first.controller.leave(HANG_S, linger_s=0))
        await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines_draining") == 1)
        for plan in list(first.rank.plans):  # what is in flight is not lost
            first.rank.answer(plan)
        await asyncio.wait_for(departing, HANG_S)
        second.rank.answers = True
        for plan in list(second.rank.plans):
            second.rank.answer(plan)
        reason = scheduler_pb2.COMPLETION_REASON_LENGTH
        assert await it.ends(2) == {"a": reason, "b": reason}
        counted = Samples.of(it.registry)
        assert counted.sum("orcinus_requests_moved_total") == 1
        assert counted.sum("orcinus_requests_suspended_total") == 0
        assert counted.sum("orcinus_pipeline_losses_total") == 0
        assert counted.sum("orcinus_pipelines") == 1


async def test_only_pipeline_serves_until_free_workers_have_formed_another_one() -> None:
    async with scene(1) as it, fake_stage(answers=True) as old:
        it.stages.add(old.address)
        await formed(it, 1)
        departing = asyncio.create_task(old.controller.leave(HANG_S, linger_s=0))
        await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines_draining") == 1)
        await submitted(it, "a")
        assert (await it.ends(1)).keys() == {"a"}
        async with fake_stage(answers=True, block_size=8) as new:  # another build
            it.stages.add(new.address)
            await formed(it, 2)
            await asyncio.wait_for(departing, HANG_S)
            await submitted(it, "b")
            assert (await it.ends(1)).keys() == {"b"}
            assert Samples.of(it.registry).sum("orcinus_pipeline_losses_total") == 0


async def test_stage_that_stays_serves_until_the_replacement_of_the_other_has_loaded() -> None:
    async with (
        scene(2) as it,
        fake_stage(0, 2, answers=True) as goes,
        fake_stage(1, 2) as stays,
        fake_worker(answers=True) as comes,
    ):
        it.stages.add(goes.address, stays.address)
        await formed(it, 1)
        await submitted(it, "a", n_tokens=3)
        await until(lambda: stays.rank.plans)
        [epoch] = set(joined(goes, stays))
        departing = asyncio.create_task(goes.controller.leave(HANG_S, linger_s=0))
        it.stages.add(comes.address)
        await until(lambda: comes.controller.assignment.place is not None)
        stays.rank.answers = True
        for plan in list(stays.rank.plans):
            stays.rank.answer(plan)
        await asyncio.wait_for(departing, HANG_S)
        await formed(it, 2)
        assert len(set(joined(comes, stays)) - {epoch}) == 1
        assert (await it.ends(1)).keys() == {"a"}
        assert Samples.of(it.registry).sum("orcinus_pipeline_losses_total") == 0


@contextlib.asynccontextmanager
async def leaving(*stages: FakeStage) -> AsyncIterator[None]:
    """Stages that were told to stop, and say so in each heartbeat."""
    for one in stages:
        one.controller.departure.begin(HANG_S)
    async with beating(*stages):
        yield


async def test_a_new_leader_serves_with_workers_that_leave_until_others_have_loaded() -> None:
    async with (
        fake_stage(0, 2, answers=True) as first,
        fake_stage(0, 2, answers=True) as spare,
        fake_stage(1, 2, answers=True) as second,
        leaving(first, spare, second),
        scene(2) as it,
    ):
        it.stages.terminate(first.address, spare.address, second.address)
        await formed(it, 1)
        await submitted(it, "a")
        assert (await it.ends(1)).keys() == {"a"}
        await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines_draining") == 1)
        async with fake_worker(answers=True) as c, fake_worker(answers=True) as d:
            it.stages.add(c.address, d.address)
            await formed(it, 2)  # and no more
            await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines") == 1)
            await submitted(it, "b")
            assert (await it.ends(1)).keys() == {"b"}
            assert len(set(joined(c, d))) == 1
            counted = Samples.of(it.registry)
            assert counted.sum("orcinus_pipeline_losses_total") == 0
            assert counted.sum("orcinus_epochs_formed_total") == 2


async def test_workers_of_another_model_load_while_all_others_leave() -> None:
    async with fake_stage(answers=True) as old, leaving(old), scene(1) as it:
        it.stages.terminate(old.address)
        await formed(it, 1)
        async with fake_stage(answers=True, model="another") as new:
            it.stages.add(new.address)
            await formed(it, 2)
            await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines") == 1)
            assert joined(new) > joined(old)


async def test_workers_of_another_model_stay_out_while_a_worker_of_the_pipeline_stays() -> None:
    async with (
        scene(2) as it,
        fake_stage(0, 2, answers=True) as goes,
        fake_stage(1, 2, answers=True) as stays,
        fake_stage(0, 2, model="another") as other,
        fake_stage(1, 2, model="another") as another,
    ):
        it.stages.add(goes.address, stays.address)
        await formed(it, 1)
        it.stages.add(other.address, another.address)
        async with leaving(goes), fake_worker(answers=True) as comes:
            await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines_draining") == 1)
            it.stages.add(comes.address)
            await formed(it, 2)
            assert joined(comes) == joined(stays)
            assert joined(other, another) == [0, 0]


async def test_a_worker_that_leaves_completes_a_pipeline_while_its_replacement_loads() -> None:
    async with (
        fake_stage(0, 2, answers=True) as leaves,
        fake_stage(1, 2, answers=True) as stays,
        fake_worker(loads=False) as comes,
        leaving(leaves),
        scene(2) as it,
    ):
        it.stages.terminate(leaves.address)
        it.stages.add(stays.address, comes.address)
        await formed(it, 1)
        await until(lambda: comes.controller.assignment.place == PipelinePlace(0, 2))
        await submitted(it, "a")
        assert (await it.ends(1)).keys() == {"a"}


async def test_requests_of_the_only_pipeline_wait_when_the_time_of_its_worker_is_over() -> None:
    async with scene(1) as it, fake_stage() as old:
        it.stages.add(old.address)
        await formed(it, 1)
        await submitted(it, "a", n_tokens=20)
        await until(lambda: old.rank.plans)
        departing = asyncio.create_task(old.controller.leave(0.5))
        await until(lambda: Samples.of(it.registry).sum("orcinus_pipelines_draining") == 1)
        for plan in list(old.rank.plans):
            old.rank.answer(plan)
        assert await it.until_closed() == []
        await asyncio.wait_for(departing, HANG_S)
        async with fake_stage(answers=True) as new:
            it.stages.add(new.address)
            assert (await it.ends(1)).keys() == {"a"}
            assert Samples.of(it.registry).sum("orcinus_pipeline_losses_total") == 0


async def test_request_that_has_to_change_its_build_is_counted() -> None:
    async with scene(1) as it, fake_stage() as old, fake_stage(block_size=8) as new:
        it.stages.add(old.address)
        await formed(it, 1)
        await submitted(it, "a", n_tokens=20)
        await until(lambda: old.rank.plans)
        it.stages.add(new.address)
        await formed(it, 2)
        old.rank.answers = True
        for plan in list(old.rank.plans):
            old.rank.answer(plan)
        assert (await it.ends(1)).keys() == {"a"}
        assert new.rank.plans == [], "a pipeline of its build serves"
        old.rank.answers = False
        n_answered = len(old.rank.plans)
        await submitted(it, "b", n_tokens=20)
        await until(lambda: len(old.rank.plans) > n_answered)
        old.rank.answer(old.rank.plans[n_answered])
        old.controller.on_exit(0, -signal.SIGKILL)
        await until_suspended(it)
        new.rank.answers = True
        for plan in list(new.rank.plans):
            new.rank.answer(plan)
        assert (await it.ends(1)).keys() == {"b"}
        assert Samples.of(it.registry).sum("orcinus_requests_changed_build_total") == 1


async def test_tokens_that_came_from_another_scheduler_are_continued_by_their_build() -> None:
    async with scene(1) as it, fake_stage(answers=True) as old:
        it.stages.add(old.address)
        await formed(it, 1)
        async with fake_stage(answers=True, block_size=8) as new:
            it.stages.add(new.address)
            await formed(it, 2)
            builds = [build_of(traits_of(one.controller.describe())) for one in (old, new)]
            for name, build in zip("ab", builds, strict=True):
                await it.submit(name, n_tokens=5, generated_token_ids=[10], build=build)
            assert (await it.ends(2)).keys() == {"a", "b"}
            assert Samples.of(it.registry).sum("orcinus_requests_changed_build_total") == 0
            await it.submit("c", n_tokens=5, generated_token_ids=[10], build="gone")
            told = [(one.request_id, one.build) for one in await it.builds(1)]
            assert told[0][0] == "c"
            assert told[0][1] in builds
            assert Samples.of(it.registry).sum("orcinus_requests_changed_build_total") == 1


def test_no_pipeline_takes_no_request() -> None:
    fleet = Fleet(RequestPool(max_requests=1))
    with pytest.raises(Unavailable, match="no pipeline serves"):
        fleet.submit(Request(RequestId("a"), [1], 1))


async def test_number_of_pipelines_is_limited() -> None:
    async with scene(1, max_pipelines=1) as it, fake_stage() as first, fake_stage() as second:
        it.stages.add(first.address, second.address)
        await it.until_open()
        await asyncio.sleep(0.5)  # long enough for another pipeline
        assert sorted(map(bool, joined(first, second))) == [False, True]


async def test_cancelled_request_ends_in_the_pipeline_that_has_it() -> None:
    async with two_pipelines() as (it, first, second):
        await submitted(it, "a", "b")
        await until(lambda: first.rank.plans and second.rank.plans)
        for name in "ab":
            await it.cancel(name)
        await submitted(it, "c")
        while "c" not in {one.request_id for one in (await it.read()).accepted}:
            pass  # the cancellations came before
        for stage in (first, second):
            stage.rank.answer(stage.rank.plans[0])
        reason = scheduler_pb2.COMPLETION_REASON_CANCELLED
        assert await it.ends(2) == {"a": reason, "b": reason}
