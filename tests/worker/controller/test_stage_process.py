"""Stages in processes of their own, some of which are killed or stopped: what they say of
themselves, and how the others form the next epoch without them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc, tls
from services.common.health import LIVENESS, READINESS, STARTUP
from services.local.child import Child
from tests import checkpoints
from tests.addresses import free_address
from tests.certificates import Authority
from tests.checkpoints import Oracle
from tests.limits import HANG_S
from tests.worker.engine.plans import decode, prefill

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [9, 8, 7]
N_STAGES = 3
REFORM_S = 30
"""Far less than any timeout of a transfer, on a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("model"))


class Stage:
    """A worker process, and what one says to it."""

    def __init__(self, child: Child, address: str, connect: rpc.Connect) -> None:
        self.child = child
        self.address = address
        self.process = psutil.Process(child._process.pid)
        self.channel = connect(address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    @classmethod
    async def start(
        cls,
        model: Path,
        index: int | None,
        *options: str,
        n_stages: int = N_STAGES,
        connect: rpc.Connect = rpc.connect,
        module: str = "services.worker",
    ) -> "Stage":
        child = await Child.start(
            f"stage {index}",
            module,
            [
                f"--model={model}",
                "--address=127.0.0.1:0",
                *([] if index is None else [f"--stage-index={index}"]),
                f"--n-stages={n_stages}",
                "--kv-memory=1MiB",
                "--n-threads=1",
                *options,
            ],
        )
        return cls(child, await child.wait_for("address"), connect)

    async def describe(self) -> worker_pb2.DescribeResponse:
        await self.child.wait_for("ready")
        description: worker_pb2.DescribeResponse = await self.stub.Describe(
            worker_pb2.DescribeRequest(), timeout=HANG_S
        )
        return description

    async def says(self, service: str) -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        response: health_pb2.HealthCheckResponse = await self.health.Check(request, timeout=HANG_S)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def rank(self) -> psutil.Process:
        [rank] = self.process.children()
        return rank

    @property
    def is_running(self) -> bool:
        try:
            return self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: int) -> None:
        """To the controller and its rank."""
        os.killpg(self.process.pid, number)

    async def end(self) -> None:
        await self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        await self.child.stop()


class Pipeline:
    """Stages that are replaced one by one."""

    def __init__(self, model: Path, stages: list[Stage]) -> None:
        self.model = model
        self.stages = stages
        self.old: list[Stage] = []
        self.rendezvous = ""
        self.epoch = 0

    async def replace(self, index: int) -> None:
        """Starts another process for the stage, at another address."""
        self.old.append(self.stages[index])
        self.stages[index] = await Stage.start(self.model, index)
        await self.stages[index].describe()

    async def come_back_without_restarts(self, lost: int) -> None:
        """Replaces a stage and forms the next epoch, with the same ranks on all others."""
        ranks = [stage.rank.pid for index, stage in enumerate(self.stages) if index != lost]
        await self.replace(lost)
        async with asyncio.timeout(REFORM_S):
            await self.join()
        others = [stage for index, stage in enumerate(self.stages) if index != lost]
        assert [stage.rank.pid for stage in others] == ranks

    async def join(self) -> None:
        """Forms the next epoch."""
        self.epoch += 1
        described = await self.stages[0].stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_S)
        self.rendezvous = described.rendezvous_address
        await asyncio.gather(*(self.join_one(index) for index in range(len(self.stages))))

    async def join_one(self, index: int, *, timeout_s: float = 30) -> None:
        await self.stages[index].stub.JoinPipeline(
            worker_pb2.JoinPipelineRequest(
                pipeline_id="p",
                epoch=self.epoch,
                stage_index=index,
                members=[stage.address for stage in self.stages],
                rendezvous_address=self.rendezvous,
                tp_size=1,
                n_kv_blocks=8,
            ),
            timeout=timeout_s,
        )

    async def reports(self, index: int) -> Any:
        watch = self.stages[index].stub.WatchStage(
            worker_pb2.WatchStageRequest(), metadata=rpc.epoch_metadata(self.epoch)
        )
        await watch.wait_for_connection()
        return watch

    async def generate(self) -> list[int]:
        """The first token after the prompt."""
        watch = await self.reports(N_STAGES - 1)
        plans = await self.send_plan()
        async with asyncio.timeout(HANG_S):
            while not (report := await watch.read()).HasField("result"):
                assert not report.HasField("failure"), report
        plans.cancel()
        watch.cancel()
        return list(report.result.token_ids)

    async def send_plan(self) -> Any:
        plans = self.stages[0].stub.RunIterations(metadata=rpc.epoch_metadata(self.epoch))
        await plans.write(prefill(PROMPT, epoch=self.epoch))
        return plans


@contextlib.asynccontextmanager
async def pipeline(
    model: Path, *options: str, connect: rpc.Connect = rpc.connect
) -> AsyncIterator[Pipeline]:
    started = await asyncio.gather(
        *(Stage.start(model, index, *options, connect=connect) for index in range(N_STAGES))
    )
    made = Pipeline(model, list(started))
    try:
        await asyncio.gather(*(stage.describe() for stage in made.stages))
        await made.join()
        yield made
    finally:
        await asyncio.gather(*(stage.end() for stage in (*made.stages, *made.old)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[Pipeline]:
    """A pipeline for those tests that leave it whole."""
    async with pipeline(model) as stages:
        yield stages


@pytest_asyncio.fixture(loop_scope="module")
async def whole(shared: Pipeline) -> Pipeline:
    """A pipeline in an epoch in which nothing has happened yet."""
    await shared.join()
    return shared


@pytest.mark.thorough
async def test_epochs_leave_nothing_behind(whole: Pipeline) -> None:
    processes = [p for stage in whole.stages for p in (stage.process, stage.rank)]

    def used() -> list[int]:
        return [n for p in processes for n in (p.num_threads(), p.num_fds())]

    for _ in range(6):
        await whole.join()
        await whole.generate()
    early = used()
    for _ in range(14):
        await whole.join()
        await whole.generate()
    async with asyncio.timeout(HANG_S):  # what an epoch had may go a moment after it
        while any(now > then + 2 for then, now in zip(early, used(), strict=True)):
            await asyncio.sleep(0.1)


@pytest.mark.thorough
async def test_a_busy_stage_gives_signs_of_life_as_an_idle_one_does(whole: Pipeline) -> None:
    watch = await whole.reports(1)
    first = whole.stages[0].rank
    first.suspend()  # so that the next one waits for its activations
    try:
        await whole.send_plan()
        async with asyncio.timeout(HANG_S):
            for _ in range(2):
                assert (await watch.read()).HasField("heartbeat")
    finally:
        first.resume()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lost", [0, *(pytest.param(index, marks=pytest.mark.thorough) for index in (1, 2))]
)
async def test_a_stage_that_is_killed_comes_back_and_no_other_restarts(
    whole: Pipeline, lost: int
) -> None:
    expected = Oracle(whole.model).generate(PROMPT, 1)
    assert await whole.generate() == expected
    whole.stages[lost].signal(signal.SIGKILL)
    await whole.come_back_without_restarts(lost)
    assert await whole.generate() == expected


@pytest.mark.thorough
async def test_a_stage_that_falls_silent_keeps_no_other_from_the_next_epoch(
    whole: Pipeline,
) -> None:
    # A stage that is stopped answers like one whose node is cut off: not at all.
    expected = Oracle(whole.model).generate(PROMPT, 1)
    for lost in (2, 1):
        whole.stages[lost].signal(signal.SIGSTOP)
        await whole.send_plan()  # those behind it wait for its activations
        await whole.come_back_without_restarts(lost)
        assert await whole.generate() == expected
        await whole.join()
    whole.stages[0].signal(signal.SIGSTOP)
    whole.epoch += 1  # those behind it wait for a rendezvous that does not answer
    waiting = [asyncio.create_task(whole.join_one(index)) for index in (1, 2)]
    await whole.come_back_without_restarts(0)
    assert await whole.generate() == expected
    for refusal in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(refusal, grpc.aio.AioRpcError)
        assert refusal.code() is grpc.StatusCode.ABORTED


@pytest.mark.thorough
async def test_a_stopped_rank_ends_its_stage_and_no_other(whole: Pipeline) -> None:
    stage = whole.stages[1]
    watch = await whole.reports(1)
    assert await stage.says(LIVENESS)
    rank = stage.rank
    rank.suspend()
    async with asyncio.timeout(HANG_S):
        while not (report := await watch.read()).HasField("failure"):
            assert report.HasField("heartbeat")
        assert "no sign of life for 2 s" in report.failure.reason
        assert await stage.child.obituary() == f"stage 1: {report.failure.reason}"
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [rank], timeout=HANG_S)
    assert gone == [rank]
    assert not stage.process.is_running() or not stage.process.children()
    for neighbour in (whole.stages[0], whole.stages[2]):
        assert neighbour.is_running
        assert await neighbour.says(LIVENESS)
        assert await neighbour.says(READINESS)
    await whole.come_back_without_restarts(1)


@pytest.mark.thorough
async def test_a_rank_whose_main_thread_hangs_ends_its_stage(model: Path) -> None:
    stage = await Stage.start(
        model, 0, "--hang-limit-s=2", n_stages=1, module="tests.worker.controller.hanging_rank"
    )
    whole = Pipeline(model, [stage])
    try:
        await stage.describe()
        await whole.join()
        watch = await whole.reports(0)
        plans = await whole.send_plan()
        async with asyncio.timeout(HANG_S):
            while not (report := await watch.read()).HasField("result"):
                assert report.HasField("heartbeat")
        await plans.write(decode([*PROMPT, 1], epoch=whole.epoch))
        async with asyncio.timeout(HANG_S):  # a little of which a busy machine may take
            while not (report := await watch.read()).HasField("failure"):
                assert report.HasField("heartbeat")
            assert "rank 0: it hangs: it computes iteration 2 for" in report.failure.reason
            assert await stage.child.obituary() == f"stage 0: {report.failure.reason}"
    finally:
        await stage.end()


@pytest.mark.thorough
async def test_a_controller_that_was_stopped_joins_the_next_epoch_with_its_ranks(
    whole: Pipeline,
) -> None:
    expected = Oracle(whole.model).generate(PROMPT, 1)
    ranks = [stage.rank.pid for stage in whole.stages]
    stopped = whole.stages[1]
    stopped.process.suspend()
    try:
        await asyncio.sleep(7)  # longer than its ranks or its event loop may be silent
        whole.epoch += 1
        with pytest.raises(grpc.aio.AioRpcError):
            await whole.join_one(1, timeout_s=0.5)  # it will hear of it late
    finally:
        stopped.process.resume()
    async with asyncio.timeout(REFORM_S):
        await whole.join()
    assert await whole.generate() == expected
    assert [stage.rank.pid for stage in whole.stages] == ranks


@pytest.mark.thorough
async def test_a_stage_says_how_it_is(model: Path) -> None:
    probed = free_address()
    stage = await Stage.start(model, 0, f"--health-address={probed}", n_stages=1)
    statuses = health_pb2.HealthCheckResponse
    try:
        async with rpc.connect(probed) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=READINESS)
            watch = health.Watch(request)
            assert (await watch.read()).status == statuses.NOT_SERVING
            assert await stage.says(LIVENESS)
            assert (await watch.read()).status == statuses.SERVING
            await stage.describe()
            for name in (LIVENESS, STARTUP, "", "orcinus.v1.WorkerService"):
                assert await stage.says(name)
            stage.process.terminate()
            assert (await watch.read()).status == statuses.NOT_SERVING
        assert await stage.child.obituary() == "stage 0 exited with status 0"
    finally:
        await stage.end()


@pytest.mark.thorough
async def test_with_certificates_only_the_right_roles_reach_a_stage_and_plans_pass(
    model: Path, tmp_path: Path
) -> None:
    authority = Authority()
    for role in (tls.WORKER, tls.SCHEDULER, tls.FRONTEND):
        authority.mount(tmp_path / role, role)
    options = [f"--tls-dir={tmp_path / tls.WORKER}"]
    scheduler = tls.connector(tmp_path / tls.SCHEDULER, role=tls.WORKER)
    async with pipeline(model, *options, connect=scheduler) as stages:
        assert await stages.generate() == Oracle(model).generate(PROMPT, 1)
        for connect, refused_with in (
            (rpc.connect, grpc.StatusCode.UNAVAILABLE),
            (
                tls.connector(tmp_path / tls.FRONTEND, role=tls.WORKER),
                grpc.StatusCode.PERMISSION_DENIED,
            ),
        ):
            async with connect(stages.stages[0].address) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_S)
                assert refusal.value.code() is refused_with


async def assign(stage: Stage, index: int, epoch: int) -> None:
    await stage.stub.AssignStage(
        worker_pb2.AssignStageRequest(epoch=epoch, stage_index=index, n_stages=N_STAGES),
        timeout=HANG_S,
    )


@pytest.mark.thorough
async def test_a_worker_without_a_stage_loads_the_one_it_is_assigned(model: Path) -> None:
    worker = await Stage.start(model, None)
    try:
        described = await worker.stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_S)
        assert described.state == worker_pb2.WORKER_STATE_FREE
        [rank] = worker.process.children()
        assert await worker.says(STARTUP)
        assert await worker.says(LIVENESS)
        assert not await worker.says(READINESS)
        await assign(worker, 2, epoch=1)
        described = await worker.describe()
        assert (described.stage_index, described.n_stages) == (2, N_STAGES)
        assert worker.process.children() == [rank]
        assert described.state == worker_pb2.WORKER_STATE_READY
        assert described.traits["block_size"] == "16"
        assert await worker.says(READINESS)
        await assign(worker, 1, epoch=2)
        assert await worker.child.obituary() == "stage None exited with status 0"
    finally:
        await worker.end()


@pytest.mark.thorough
async def test_a_stage_that_takes_too_long_to_load_fails(model: Path) -> None:
    stage = await Stage.start(model, 0, "--load-limit-s=0.1")
    try:
        assert await stage.child.obituary() == "stage 0: no weights within 0.1 s"
    finally:
        await stage.end()
