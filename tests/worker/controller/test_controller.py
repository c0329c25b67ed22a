"""Controllers on real sockets with fake ranks: plans, epochs, failures. No tensors."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.common.errors import Unavailable
from services.worker.channel import MessageKind
from services.worker.controller.controller import Controller
from services.worker.controller.plan_relay import PlanRelay
from tests.fakes import FakeStage, fake_stage, fake_stages
from tests.worker.controller.recording_rank import RecordingRank


def stub_of(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerServiceStub:
    return worker_pb2_grpc.WorkerServiceStub(channel)


async def join(stages: list[FakeStage], epoch: int) -> None:
    """Puts all stages into an epoch."""

    async def one(index: int) -> None:
        async with rpc.connect(stages[index].address) as channel:
            await stub_of(channel).JoinPipeline(
                worker_pb2.JoinPipelineRequest(
                    pipeline_id="p",
                    epoch=epoch,
                    stage_index=index,
                    members=[stage.address for stage in stages],
                    tp_size=1,
                    n_kv_blocks=8,
                ),
                timeout=5,
            )

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
            await asyncio.wait_for(stages[2].rank.has_plan.wait(), 5)
            await plans.done_writing()
            await plans
        sent = [plan(iteration).SerializeToString() for iteration in (1, 2)]
        while len(stages[2].rank.plans) < 2:
            await asyncio.sleep(0.01)
        assert [stage.rank.plans for stage in stages] == [sent, sent, sent]


async def test_a_stage_that_is_loading_is_unavailable() -> None:
    async with fake_stage(loads=False) as stage, rpc.connect(stage.address) as channel:
        code = await refused_with(lambda: stub_of(channel).Describe(worker_pb2.DescribeRequest()))
        assert code is grpc.StatusCode.UNAVAILABLE
        stage.rank.load()
        description = await stub_of(channel).Describe(worker_pb2.DescribeRequest())
        assert (description.model, description.epoch) == ("fake", 0)


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
        await asyncio.wait_for(stages[1].rank.has_plan.wait(), 5)
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
        controller.on_exit(0, "exited with status 1")
        assert (await watch.read()).failure.reason == "rank 0: out of memory"
        assert controller.rank_watch.failure.result() == "rank 0: out of memory"


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
            controller.on_exit(0, "exited with status -9")

    controller = Controller(tp_size=1, plan_relay=LosesARank)
    rank = RecordingRank()
    controller.attach([rank])
    request = worker_pb2.JoinPipelineRequest(pipeline_id="p", epoch=1, members=["nobody"])
    with pytest.raises(Unavailable, match="rank 0 exited with status -9"):
        await asyncio.wait_for(controller.join(request), 5)
