"""Controllers on real sockets with fake ranks: plans, epochs, failures. No tensors."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.common.epochs import MAX_EPOCH, MAX_REACHED_EPOCH
from services.common.errors import Unavailable
from services.common.protocol import PROTOCOL
from services.scheduler.cluster.term import Unopposed
from services.worker.channel import MessageKind
from services.worker.controller.controller import Controller
from services.worker.controller.plan_relay import PlanRelay
from tests.fakes import TRAITS, FakeStage, describe_stage, fake_stage, fake_stages, fake_worker
from tests.limits import HANG_S
from tests.worker.controller.recording_rank import RecordingRank


def stub_of(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerServiceStub:
    return worker_pb2_grpc.WorkerServiceStub(channel)


def joining(epoch: int, index: int, members: list[str]) -> worker_pb2.JoinPipelineRequest:
    return worker_pb2.JoinPipelineRequest(
        pipeline_id="p",
        epoch=epoch,
        stage_index=index,
        members=members,
        tp_size=1,
        n_kv_blocks=8,
    )


async def join(stages: list[FakeStage], epoch: int) -> None:
    """Puts all stages into an epoch."""
    members = [stage.address for stage in stages]

    async def one(index: int) -> None:
        async with rpc.connect(stages[index].address) as channel:
            await stub_of(channel).JoinPipeline(joining(epoch, index, members), timeout=HANG_S)

    await asyncio.gather(*(one(index) for index in range(len(stages))))


def plan(iteration: int, epoch: int = 1) -> worker_pb2.RunIterationsRequest:
    return worker_pb2.RunIterationsRequest(
        pipeline_id="p", epoch=epoch, iteration=iteration, row=[0], n_tokens=[1], sample=[True]
    )


async def refused_with(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call()  # type: ignore[misc]
    return error.value.code()


async def test_a_plan_reaches_the_last_stage_while_every_rank_is_held_up() -> None:
    async with fake_stages(3) as stages:
        await join(stages, epoch=1)
        async with rpc.connect(stages[0].address) as channel:
            plans = stub_of(channel).RunIterations(metadata=rpc.epoch_metadata(1))
            for iteration in (1, 2):
                await plans.write(plan(iteration))
            await asyncio.wait_for(stages[2].rank.has_plan.wait(), HANG_S)
            await plans.done_writing()
            await plans
        sent = [plan(iteration).SerializeToString() for iteration in (1, 2)]
        while len(stages[2].rank.plans) < 2:
            await asyncio.sleep(0.01)
        assert [stage.rank.plans for stage in stages] == [sent, sent, sent]


async def test_a_stage_that_is_loading_says_so_and_joins_nothing() -> None:
    async with fake_stage(1, 2, loads=False) as stage, rpc.connect(stage.address) as channel:
        description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
        assert description == worker_pb2.DescribeResponse(
            state=worker_pb2.WORKER_STATE_LOADING,
            stage_index=1,
            n_stages=2,
            is_fixed=True,
            protocol=PROTOCOL,
            traits=TRAITS,
            name=stage.controller.name,
            process=description.process,
        )
        assert await refused_with(lambda: join([stage], epoch=1)) is grpc.StatusCode.UNAVAILABLE
        stage.rank.load()
        description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
        assert (description.model, description.epoch) == ("fake", 0)
        assert description.state == worker_pb2.WORKER_STATE_READY


async def test_a_stage_whose_rank_is_lost_describes_itself_no_more() -> None:
    async with fake_stage() as stage, rpc.connect(stage.address) as channel:
        stage.controller.on_exit(0, -9)
        code = await refused_with(lambda: stub_of(channel).Describe(worker_pb2.DescribeRequest()))
        assert code is grpc.StatusCode.UNAVAILABLE


async def assign(channel: grpc.aio.Channel, stage: int, epoch: int, n_stages: int = 2) -> None:
    """Gives a worker a stage."""
    request = worker_pb2.AssignStageRequest(epoch=epoch, stage_index=stage, n_stages=n_stages)
    await stub_of(channel).AssignStage(request)


async def test_a_worker_is_free_until_a_stage_is_assigned_to_it() -> None:
    async with fake_worker() as worker, rpc.connect(worker.address) as channel:
        description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
        assert description.process
        description.ClearField("process")
        free = worker_pb2.WORKER_STATE_FREE
        assert description == worker_pb2.DescribeResponse(
            state=free, protocol=PROTOCOL, traits=TRAITS, name=worker.controller.name
        )
        assert await refused_with(lambda: join([worker], epoch=1)) is grpc.StatusCode.UNAVAILABLE
        await assign(channel, 1, epoch=2)
        await asyncio.wait_for(worker.controller.loading.wait(), HANG_S)
        description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
        assert (description.stage_index, description.n_stages) == (1, 2)
        assert description.state == worker_pb2.WORKER_STATE_READY
        assert (description.epoch, description.is_fixed) == (2, False)
        await stub_of(channel).JoinPipeline(joining(3, 1, [worker.address] * 2), timeout=HANG_S)


async def test_an_assignment_of_an_older_term_is_aborted() -> None:
    async with fake_worker() as worker, rpc.connect(worker.address) as channel:
        await assign(channel, 0, epoch=5)
        for stale in (4, 5):
            code = await refused_with(lambda: assign(channel, 1, epoch=stale))  # noqa: B023
            assert code is grpc.StatusCode.ABORTED
        assert not worker.controller.assignment.is_recalled.is_set()
        late = joining(5, 0, [worker.address] * 2)
        code = await refused_with(lambda: stub_of(channel).JoinPipeline(late))
        assert code is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 2**64 - 1])
async def test_an_epoch_that_no_term_has_is_refused_and_changes_nothing(epoch: int) -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        code = await refused_with(lambda: join(stages, epoch=epoch))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code = await refused_with(lambda: assign(channel, 0, epoch=epoch, n_stages=1))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        await join(stages, epoch=1)


async def test_a_worker_that_is_about_to_end_says_so_at_once_and_takes_nothing_more() -> None:
    async with fake_stage() as stage, rpc.connect(stage.address) as channel:
        stub = stub_of(channel)
        await join([stage], 1)
        metadata = rpc.epoch_metadata(1)
        watch = stub.WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata)
        await watch.wait_for_connection()
        await stage.controller.end()
        assert await asyncio.wait_for(watch.read(), HANG_S) is grpc.aio.EOF
        for call in (
            lambda: stub.Describe(worker_pb2.DescribeRequest()),
            lambda: stub.AssignStage(worker_pb2.AssignStageRequest(epoch=2, n_stages=1)),
            lambda: stub.JoinPipeline(joining(2, 0, [stage.address])),
        ):
            assert await refused_with(call) is grpc.StatusCode.UNAVAILABLE


async def test_a_stage_whose_epoch_no_leader_can_have_reached_ends_for_the_next_leader() -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        recalled = stages[0].controller.assignment.is_recalled
        await join(stages, epoch=MAX_EPOCH)
        assert not recalled.is_set()
        code = await refused_with(lambda: join(stages, epoch=7))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert recalled.is_set()
        recalled.clear()
        code = await refused_with(lambda: assign(channel, 0, epoch=7, n_stages=1))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert recalled.is_set()


async def test_a_leader_gets_a_stage_back_that_a_stranger_took_to_the_last_epoch() -> None:
    stranger = MAX_EPOCH
    for last in (MAX_REACHED_EPOCH, stranger):
        async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
            await join(stages, epoch=last)
            description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
            epoch = await Unopposed().next_epoch(description.epoch)
            if last == stranger:
                await refused_with(lambda: join(stages, epoch=epoch))  # noqa: B023
                assert stages[0].controller.assignment.is_recalled.is_set()
            else:
                await join(stages, epoch=epoch)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stage_index": 1}, "stage_index"),
        ({"tp_size": 2**31}, "tp_size"),
        ({"members": []}, "members"),
        ({"members": ["a:1"] * 100_000}, "members"),
        ({"members": ["a" * 10_000]}, "members"),
        ({"rendezvous_address": "a" * 10_000}, "members"),
        ({"pipeline_id": "a" * 10_000}, "members"),
        ({"n_kv_blocks": 2**32 - 1}, "n_kv_blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_place_that_is_not_this_stages_is_refused_and_the_epoch_goes_on(
    change: dict[str, Any], field: str
) -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=1)
        place = {"pipeline_id": "p", "epoch": 2, "members": ["a:1"], "tp_size": 1}
        request = worker_pb2.JoinPipelineRequest(**{**place, **change})
        with pytest.raises(grpc.aio.AioRpcError, match=field) as error:
            await stub_of(channel).JoinPipeline(request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert stages[0].controller.epoch.number == 1


async def test_an_epoch_of_too_many_digits_is_refused_in_metadata() -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        metadata = ((rpc.EPOCH_METADATA, "9" * 5000),)  # int() refuses so many
        watch = stub_of(channel).WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError, match="orcinus-epoch") as error:
            await watch.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_epoch_in_metadata_that_exceeds_64_bits_is_not_the_current_one() -> None:
    number = "9" * rpc.MAX_DIGITS
    assert int(number) > 2**64
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=1)
        metadata = ((rpc.EPOCH_METADATA, number),)
        for call in (
            stub_of(channel).WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata).read(),
            stub_of(channel).PrepareGrammar(worker_pb2.PrepareGrammarRequest(), metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=f"epoch {number} is not the") as error:
                await call
            assert error.value.code() is grpc.StatusCode.ABORTED


async def test_a_pipeline_of_too_many_stages_is_refused() -> None:
    async with fake_worker() as worker, rpc.connect(worker.address) as channel:
        code = await refused_with(lambda: assign(channel, 0, epoch=1, n_stages=2**32 - 1))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert worker.controller.assignment.place is None


async def test_a_worker_that_is_to_be_another_stage_is_recalled() -> None:
    async with fake_worker() as worker, rpc.connect(worker.address) as channel:
        await assign(channel, 0, epoch=1)
        await assign(channel, 0, epoch=2)
        assert not worker.controller.assignment.is_recalled.is_set()
        await assign(channel, 1, epoch=3)
        assert worker.controller.assignment.is_recalled.is_set()


async def test_a_stage_of_the_settings_cannot_be_assigned_another() -> None:
    async with fake_stage(0, 2) as stage, rpc.connect(stage.address) as channel:
        await assign(channel, 0, epoch=1)
        for index, n_stages in ((1, 2), (0, 3), (2, 2)):
            code = await refused_with(lambda: assign(channel, index, 2, n_stages))  # noqa: B023
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert stage.controller.describe().epoch == 1


async def test_an_epoch_that_is_not_newer_is_aborted() -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=4)
        for stale in (3, 4):
            assert await refused_with(lambda: join(stages, epoch=stale)) is grpc.StatusCode.ABORTED  # noqa: B023
        description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
        assert description.epoch == 4


@pytest.mark.parametrize("epoch", [0, 1, 3], ids=["never", "past", "future"])
async def test_streams_of_another_epoch_are_aborted(epoch: int) -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=1)
        await join(stages, epoch=2)
        metadata = rpc.epoch_metadata(epoch)
        watch = stub_of(channel).WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata)
        assert await refused_with(watch.read) is grpc.StatusCode.ABORTED
        plans = stub_of(channel).RunIterations(metadata=metadata)
        assert await refused_with(lambda: plans) is grpc.StatusCode.ABORTED
        assert stages[0].rank.plans == []


async def test_a_stream_without_an_epoch_is_refused() -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=1)
        plans = stub_of(channel).RunIterations()
        assert await refused_with(lambda: plans) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_new_epoch_ends_the_streams_of_the_old_one() -> None:
    async with fake_stages(2) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=1)
        metadata = rpc.epoch_metadata(1)
        watch = stub_of(channel).WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata)
        await watch.wait_for_connection()
        plans = stub_of(channel).RunIterations(metadata=metadata)
        await plans.write(plan(1))
        await asyncio.wait_for(stages[1].rank.has_plan.wait(), HANG_S)
        await join(stages, epoch=2)
        assert await refused_with(watch.read) is grpc.StatusCode.ABORTED
        assert await refused_with(lambda: plans) is grpc.StatusCode.ABORTED


async def test_reports_pass_through_unchanged_and_a_dead_rank_is_the_last_of_them() -> None:
    async with fake_stages(1) as stages, rpc.connect(stages[0].address) as channel:
        await join(stages, epoch=1)
        controller = stages[0].controller
        watch = stub_of(channel).WatchStage(
            worker_pb2.WatchStageRequest(), metadata=rpc.epoch_metadata(1)
        )
        await watch.wait_for_connection()
        stages[0].rank.answer(plan(7).SerializeToString())
        report = await watch.read()
        assert (report.result.iteration, list(report.result.token_ids)) == (7, [10])
        controller.on_message(0, MessageKind.FAILURE, b"out of memory")
        controller.on_exit(0, 1)
        assert (await watch.read()).failure.reason == "rank 0: out of memory"
        assert controller.rank_watch.failure.result() == "rank 0: out of memory"


async def test_a_setting_to_blame_is_named_without_the_rank_that_says_it() -> None:
    controller = Controller(tp_size=2)
    controller.on_message(1, MessageKind.REFUSAL, b"kv_memory: too little")
    assert controller.rank_watch.failure.result() == "kv_memory: too little"


async def test_a_dead_neighbour_does_not_end_the_stage() -> None:
    async with fake_stage(0, 2) as first:
        async with fake_stage(1, 2) as second:
            await join([first, second], epoch=1)
        async with rpc.connect(first.address) as channel:
            plans = stub_of(channel).RunIterations(metadata=rpc.epoch_metadata(1))
            for iteration in range(1, 6):
                await plans.write(plan(iteration))
            await plans.done_writing()
            await plans
        assert len(first.rank.plans) == 5
        assert not first.controller.rank_watch.failure.done()


async def test_a_join_does_not_wait_for_a_rank_that_was_lost_on_the_way_out_of_an_epoch() -> None:
    class LosesARank(PlanRelay):
        """Loses a rank while it ends the streams of the old epoch."""

        async def close(self) -> None:
            controller.on_exit(0, -9)

    controller = Controller(tp_size=1, plan_relay=LosesARank)
    rank = RecordingRank()
    controller.attach([rank])
    controller.on_message(0, MessageKind.LOADED, describe_stage().SerializeToString())
    request = worker_pb2.JoinPipelineRequest(
        pipeline_id="p", epoch=1, members=["nobody"], tp_size=1
    )
    with pytest.raises(Unavailable, match="rank 0 exited with status -9"):
        await asyncio.wait_for(controller.join(request), HANG_S)


async def test_a_worker_that_was_told_to_stop_says_so_until_nothing_watches_it() -> None:
    async with fake_stage() as stage, rpc.connect(stage.address) as channel:
        await join([stage], epoch=1)
        watch = stub_of(channel).WatchStage(
            worker_pb2.WatchStageRequest(), metadata=rpc.epoch_metadata(1)
        )
        await watch.wait_for_connection()
        leaving = asyncio.create_task(stage.controller.leave(3600, linger_s=0))
        report = await watch.read()
        assert 3_500_000 < report.heartbeat.leaves_in_ms <= 3_600_000
        assert (await stub_of(channel).Describe(worker_pb2.DescribeRequest())).is_leaving
        assert not leaving.done()
        watch.cancel()
        await asyncio.wait_for(leaving, HANG_S)


async def test_a_worker_that_was_told_to_stop_stays_while_another_leader_takes_its_stage() -> None:
    linger_s = 0.05
    async with fake_stage() as stage:
        reports = stage.controller.reports
        await join([stage], epoch=1)
        with reports.watch(1):
            leaving = asyncio.create_task(stage.controller.leave(3600, linger_s=linger_s))
            await asyncio.sleep(2 * linger_s)
            stage.rank.joins = False
            joining = asyncio.create_task(join([stage], epoch=2))
            while stage.controller.describe().epoch == 1:
                await asyncio.sleep(0)
        await asyncio.sleep(5 * linger_s)  # the join takes longer than a worker lingers
        assert not leaving.done()
        joining.cancel()
        await asyncio.wait((joining,))
        await asyncio.wait_for(leaving, HANG_S)


async def test_a_worker_leaves_at_once_if_it_is_in_no_pipeline_and_else_after_its_time() -> None:
    async with fake_stage() as stage, rpc.connect(stage.address) as channel:
        await asyncio.wait_for(stage.controller.leave(3600), HANG_S)
        await join([stage], epoch=1)
        watch = stub_of(channel).WatchStage(
            worker_pb2.WatchStageRequest(), metadata=rpc.epoch_metadata(1)
        )
        await watch.wait_for_connection()
        await asyncio.wait_for(stage.controller.leave(0.1), HANG_S)
        watch.cancel()
