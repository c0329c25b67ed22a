"""A leader on real controllers with fake ranks, and a frontend on a real socket."""

import asyncio
import signal
from typing import Any, Literal

import grpc
import grpc.aio
import pytest
from orcinus.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from pydantic import ValidationError

from services.common import rpc, rpc_handlers
from services.common.errors import Unavailable
from services.scheduler.building import build_order, build_scheduler, describe
from services.scheduler.cluster.term import Unopposed
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.leader import Leader
from services.scheduler.observing.request_observer import RequestObservers
from services.scheduler.pipeline import forming
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from tests.exposition import Samples
from tests.fakes import describe_stage, fake_stage, fake_stages
from tests.scheduler.leading import LIMIT_S, SERVICE, MovingStages, scene


async def test_a_scheduler_that_does_not_lead_sends_frontends_away() -> None:
    server = rpc.create_server()
    server.add_generic_rpc_handlers(
        (rpc_handlers.service_handler(SERVICE, SchedulerService(RequestObservers())),)
    )
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.connect(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="not the leader"):
            await scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect().read()
    await server.stop(grace=0)


async def test_a_frontend_may_come_before_the_pipeline() -> None:
    async with scene(1) as it, fake_stage(answers=True) as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        await it.submit("a", n_tokens=3)
        assert await it.outcome() == (3, scheduler_pb2.COMPLETION_REASON_LENGTH)


async def test_stages_are_asked_again_where_they_are_now() -> None:
    async with scene(2) as it, fake_stage(0, 2) as first, fake_stage(1, 2) as second:
        it.stages.place(1, second.address)
        it.stages.place(0, "127.0.0.1:1")  # a pod that went away before it answered
        await asyncio.sleep(0.3)
        it.stages.place(0, first.address)
        await it.until_open()


@pytest.mark.parametrize(("block_size", "is_reported"), [(1, True), (4, False)])
async def test_memory_that_holds_less_than_the_context_is_reported(
    caplog: pytest.LogCaptureFixture, block_size: int, is_reported: bool
) -> None:
    async with scene(1) as it, fake_stage(block_size=block_size) as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
    report = "prompt and answer may have 50 tokens together, not the 64 of the model"
    assert (report in caplog.text) == is_reported


def _with_a_long_pause(timeout: forming.FormingTimeout, *_: object, **__: object) -> None:
    timeout.pause_s = 10 * LIMIT_S


async def test_a_leader_that_waits_to_form_the_next_pipeline_stops_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forming.FormingTimeout, "note_loss", _with_a_long_pause)
    async with scene(1) as it, fake_stage() as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        stage.controller.on_exit(0, -signal.SIGKILL)
        await it.until_closed()
        it.stop.set()
        await asyncio.wait_for(asyncio.shield(it.leading), LIMIT_S)


async def test_a_pipeline_forms_again_when_a_lost_stage_is_back_elsewhere() -> None:
    async with scene(2) as it, fake_stage(0, 2, answers=True) as survivor:
        it.stages.place(0, survivor.address)
        async with fake_stage(1, 2) as lost:  # it never answers
            it.stages.place(1, lost.address)
            await it.until_open()
            await it.submit("a", n_tokens=3)
            assert (await it.read()).accepted
            it.stages.place(1, None)
            lost.controller.on_exit(0, -signal.SIGKILL)
            message = await it.read()
            assert message.is_closed
            assert not message.completed
            assert [(s.request_id, s.n_losses) for s in message.suspended] == [("a", 1)]
            waiting = Samples.of(it.registry)
            assert waiting.sum("orcinus_requests_suspended_total") == 1
            assert waiting.sum("orcinus_requests_waiting") == 1
        async with fake_stage(1, 2, answers=True) as replacement:
            it.stages.place(1, replacement.address)
            assert await it.outcome() == (3, scheduler_pb2.COMPLETION_REASON_LENGTH)
            assert survivor.controller.describe().epoch == 2
            counted = Samples.of(it.registry)
            assert counted.sum("orcinus_epochs_formed_total") == 2
            assert counted.sum("orcinus_pipeline_losses_total") == 1
            assert counted.sum("orcinus_pipeline_up") == 1
            assert counted.sum("orcinus_requests_accepted_total") == 1
            assert counted.sum("orcinus_requests_failed_total") == 0
            assert counted.sum("orcinus_requests_suspected_total") == 1
            assert counted.sum("orcinus_requests_resumed_total") == 1
            assert counted.sum("orcinus_recomputed_tokens_total") == 3
            assert counted.sum("orcinus_requests_finished_total", reason="length") == 1


def epoch_of(plan: bytes) -> int:
    return worker_pb2.RunIterationsRequest.FromString(plan).epoch


async def test_a_request_that_ranks_fail_at_twice_gets_no_third_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene(1) as it, fake_stage() as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        await it.submit("a", n_tokens=3)
        for epoch in (1, 2):
            async with asyncio.timeout(LIMIT_S):
                while epoch not in map(epoch_of, stage.rank.plans):
                    await asyncio.sleep(0.01)
            stage.controller.reports.publish_failure("MemoryError", is_by_itself=True)
        end = await it.end()
        assert (end.request_id, end.reason) == ("a", scheduler_pb2.COMPLETION_REASON_FAILED)
        assert "failed 2 times" in end.message
        assert f"request a fails: {end.message}" in caplog.text
        counted = Samples.of(it.registry)
        assert counted.sum("orcinus_requests_failed_total") == 1
        assert counted.sum("orcinus_requests_broken_total") == 0


async def test_a_request_is_served_while_the_ranks_compile_for_another_one() -> None:
    async with scene(2) as it, fake_stages(2, answers=True) as (first, last):
        it.stages.place(0, first.address)
        it.stages.place(1, last.address)
        await it.until_open()
        await it.submit("constrained", n_tokens=2, grammar="start: /x/")
        grammar = await last.rank.next_grammar()
        assert grammar.grammar == "start: /x/"
        assert first.rank.grammars.empty()
        await it.submit("plain", n_tokens=3)
        assert (await it.end()).request_id == "plain"
        last.rank.compile(grammar)
        assert (await it.end()).request_id == "constrained"
        admissions = [
            admission
            for data in last.rank.plans
            for admission in worker_pb2.RunIterationsRequest.FromString(data).admissions
        ]
        assert [one.grammar_digest for one in admissions] == [b"", grammar.digest]
        assert not any(one.sampling.HasField("grammar") for one in admissions)


async def test_new_ranks_compile_again_what_the_lost_ones_had_or_had_not() -> None:
    async with scene(1) as it:
        async with fake_stage() as lost:
            it.stages.place(0, lost.address)
            await it.until_open()
            await it.submit("a", n_tokens=2, grammar="start: /a/")
            await it.submit("b", n_tokens=2, grammar="start: /b/")
            lost.rank.compile(await lost.rank.next_grammar())
            assert (await lost.rank.next_grammar()).grammar == "start: /b/"
            it.stages.place(0, None)
            lost.controller.on_exit(0, -signal.SIGKILL)
            assert await it.until_closed() == []
        async with fake_stage(answers=True) as replacement:
            it.stages.place(0, replacement.address)
            for name in "ab":
                grammar = await replacement.rank.next_grammar()
                assert grammar.grammar == f"start: /{name}/"
                replacement.rank.compile(grammar)
                end = await it.end()
                assert (end.request_id, end.reason) == (
                    name,
                    scheduler_pb2.COMPLETION_REASON_LENGTH,
                )


async def test_a_grammar_that_the_ranks_refuse_ends_its_request_alone() -> None:
    async with scene(1) as it, fake_stage(answers=True) as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        await it.submit("wrong", n_tokens=2, grammar="start: wrong")
        stage.rank.compile(await stage.rank.next_grammar(), "unknown name")
        end = await it.end()
        assert (end.request_id, end.reason) == ("wrong", scheduler_pb2.COMPLETION_REASON_FAILED)
        assert end.message == "grammar: cannot be followed: unknown name"
        await it.submit("plain", n_tokens=1)
        assert (await it.end()).request_id == "plain"


async def test_a_leader_that_is_told_to_stop_lets_requests_finish_and_takes_no_more() -> None:
    async with scene(1) as it, fake_stage() as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        await it.submit("a", n_tokens=1)
        assert (await it.read()).accepted
        await asyncio.wait_for(stage.rank.has_plan.wait(), LIMIT_S)
        it.stop.set()
        assert await it.until_closed() == []
        await it.submit("b", n_tokens=1)
        [rejection] = (await it.read()).rejected
        assert rejection.reason == scheduler_pb2.REJECTION_REASON_UNAVAILABLE
        stage.rank.answer(stage.rank.plans[0])
        assert await it.outcome() == (1, scheduler_pb2.COMPLETION_REASON_LENGTH)


async def test_a_leader_that_has_handed_over_takes_requests_until_another_has_the_stages() -> None:
    handed_over = asyncio.Event()

    async def hand_over() -> None:
        handed_over.set()

    async with scene(1, hand_over=hand_over) as it, fake_stage() as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        await it.submit("a", n_tokens=1)
        assert (await it.read()).accepted
        it.stop.set()
        await asyncio.wait_for(handed_over.wait(), LIMIT_S)
        await it.submit("b", n_tokens=1)
        assert (await it.read()).accepted
        assert not it.leading.done()
        await stage.join(stage.controller.describe().epoch + 1)
        await asyncio.wait_for(it.leading, LIMIT_S)
        assert Samples.of(it.registry).sum("orcinus_requests_suspended_total") == 0


async def test_requests_that_outlast_the_drain_end_as_unavailable() -> None:
    async with scene(1, drain_s=0.2) as it, fake_stage() as stage:
        it.stages.place(0, stage.address)
        await it.until_open()
        await it.submit("a", n_tokens=1)
        assert (await it.read()).accepted
        it.stop.set()
        while not (completed := (await it.read()).completed):
            pass
        assert completed[0].reason == scheduler_pb2.COMPLETION_REASON_UNAVAILABLE


async def test_a_leader_without_stages_gives_up_and_names_those_that_are_missing() -> None:
    stages = MovingStages(3)
    stages.place(1, "127.0.0.1:1")
    settings = SchedulerSettings(n_stages=3, start_timeout_s=1)
    requests = RequestObservers()
    leader = Leader(settings, stages, SchedulerService(requests), requests=requests)
    with pytest.raises(Unavailable, match="no worker for stage 0, 1, 2; worker at 127"):
        await leader.lead(Unopposed(), asyncio.Event())


async def test_a_leader_whose_stages_never_join_gives_up_and_says_why() -> None:
    stages = MovingStages(1)
    settings = SchedulerSettings(n_stages=1, start_timeout_s=2)
    requests = RequestObservers()
    leader = Leader(settings, stages, SchedulerService(requests), requests=requests)
    async with fake_stage() as stage:
        stage.controller.on_exit(0, -signal.SIGKILL)
        stages.place(0, stage.address)
        with pytest.raises(Unavailable, match=r"no pipeline within 2 s: .*exited with status -9"):
            await asyncio.wait_for(leader.lead(Unopposed(), asyncio.Event()), LIMIT_S)


async def test_stages_of_two_builds_form_no_pipeline_until_one_is_replaced() -> None:
    async with scene(2) as it, fake_stage(0, 2) as new, fake_stage(0, 2) as old:
        it.stages.place(0, new.address)
        it.stages.place(1, old.address)  # says that it is stage 0, as an old build would say other
        await asyncio.sleep(0.5)
        assert new.controller.describe().epoch == 0
        async with fake_stage(1, 2) as replacement:
            it.stages.place(1, replacement.address)
            await it.until_open()
            it.stop.set()
            await it.until_closed()


def pipeline_of(n_stages: int) -> Pipeline:
    members = [Member(f"stage-{i}:1", describe_stage(i, n_stages)) for i in range(n_stages)]
    return Pipeline("p", 1, tuple(members))


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_every_stage_has_a_batch_and_one_stage_has_the_next_and_hands_tokens_over(
    n_stages: int,
) -> None:
    scheduler = build_scheduler(
        SchedulerSettings(n_stages=n_stages), pipeline_of(n_stages), RequestPool(max_requests=8)
    )
    assert scheduler.pipeline_depth == max(2, n_stages)
    scheduler.submit(Request(RequestId("r"), [1, 2], 10))
    assert scheduler.select() is not None
    goes_on = scheduler.select()
    assert (goes_on is not None) == (n_stages == 1)


@pytest.mark.parametrize(
    ("given", "records_decodes", "limits"),
    [
        ({}, False, (8, 8)),
        ({"speculative_tokens": 4, "max_batch_tokens": 6, "max_batch_size": 2}, False, (4, 6)),
        ({"speculative_tokens": 0}, False, None),
        ({"policy": "orca"}, False, None),
        ({}, True, None),
    ],
    ids=["default", "set", "off", "the paper's", "graphs"],
)
def test_tokens_are_drafted_where_it_can_pay(
    given: dict[str, Any], records_decodes: bool, limits: tuple[int, int] | None
) -> None:
    pipeline = pipeline_of(1)
    pipeline.first.records_decodes = records_decodes
    settings = SchedulerSettings(n_stages=1, **given)
    drafter = build_scheduler(settings, pipeline, RequestPool(max_requests=8)).drafter
    found = None if drafter is None else (drafter.max_drafts, drafter.max_batch_tokens)
    assert found == limits


@pytest.mark.parametrize(
    ("n_state_rows", "max_rows"), [((0, 0), None), ((0, 5), 5), ((7, 5), 5)], ids=str
)
def test_what_has_states_is_neither_cached_nor_drafted_and_runs_while_there_is_a_row(
    n_state_rows: tuple[int, int], max_rows: int | None
) -> None:
    pipeline = pipeline_of(2)
    for member, n_rows in zip(pipeline.members, n_state_rows, strict=True):
        member.description.n_state_rows = n_rows
    scheduler = build_scheduler(
        SchedulerSettings(n_stages=2), pipeline, RequestPool(max_requests=8)
    )
    assert scheduler.kv_manager.rows.max_rows == max_rows
    assert scheduler.kv_manager.has_prefix_cache == (max_rows is None)
    assert (scheduler.drafter is None) == (max_rows is not None)
    for name in "abcdefg":
        scheduler.submit(Request(RequestId(name), [1, 2], 10))
    batch = scheduler.select()
    assert batch is not None
    assert len(batch.spans) == (max_rows or 7)


def test_a_block_of_each_group_is_the_least_that_serves() -> None:
    pipeline = pipeline_of(1)
    pipeline.first.kv_windows.extend([0, 8, 8])
    pipeline.first.n_kv_blocks = 3
    pool, settings = RequestPool(max_requests=8), SchedulerSettings(n_stages=1)
    described = describe(pipeline, build_scheduler(settings, pipeline, pool))
    assert described.max_model_len == pipeline.first.block_size
    pipeline.first.n_kv_blocks = 2
    with pytest.raises(Unavailable, match="2 K/V blocks, and a request has 3"):
        build_scheduler(settings, pipeline, pool)


@pytest.mark.parametrize(("policy", "n_tokens"), [("orca", 20), ("chunked", 8)])
def test_the_policy_is_the_one_that_is_set(
    policy: Literal["orca", "chunked"], n_tokens: int
) -> None:
    settings = SchedulerSettings(n_stages=1, policy=policy, max_batch_size=4, max_batch_tokens=8)
    scheduler = build_scheduler(settings, pipeline_of(1), RequestPool(max_requests=8))
    scheduler.submit(Request(RequestId("r"), [1] * 20, 10))
    batch = scheduler.select()
    assert batch is not None
    assert [span.n_tokens for span in batch.spans] == [n_tokens]


@pytest.mark.parametrize(
    ("given", "names"), [({}, ["b", "a"]), ({"order": "fcfs"}, ["a", "b"])], ids=["default", "fcfs"]
)
def test_the_order_is_the_one_that_is_set_and_fair_by_default(
    given: dict[str, Any], names: list[str]
) -> None:
    order = build_order(SchedulerSettings(n_stages=1, **given))
    pool = RequestPool(max_requests=8, order=order)
    pool.add(Request(RequestId("a"), [1], 1, priority=1))
    pool.add(Request(RequestId("b"), [1], 1))
    assert [request.request_id for request in pool.selectable()] == names


def test_a_budget_that_decodes_alone_would_fill_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_batch_tokens"):
        SchedulerSettings(n_stages=1, policy="chunked", max_batch_size=9, max_batch_tokens=8)
    SchedulerSettings(n_stages=1, policy="orca", max_batch_size=9, max_batch_tokens=8)


def test_fewer_workers_than_stages_are_refused_and_more_are_several_pipelines() -> None:
    with pytest.raises(ValidationError, match="n_stages: 3 stages need as many workers"):
        SchedulerSettings(stages="a:1,b:1", n_stages=3)
    SchedulerSettings(stages="a:1,b:1,c:1,d:1", n_stages=2)
    with pytest.raises(ValidationError, match="a worker is listed twice: b:1"):
        SchedulerSettings(stages="a:1, b:1,b:1,c:1", n_stages=2)
    with pytest.raises(ValidationError, match="max_pipelines"):
        SchedulerSettings(n_stages=1, max_pipelines=0)
