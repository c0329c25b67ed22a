"""Looks after the workers beside a pipeline that serves: a spare that does not fit could take over
no stage, so it is named before it is needed."""

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.asked_worker import DESCRIBE_TIMEOUT_S
from services.scheduler.pipeline.fit import traits_of
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.pipeline.muster import Offer, unfit_beside
from services.scheduler.pipeline.shortfall import UnfitWorker, log_new

PERIOD_S = 10.0
"""Seconds between two questions to the workers beside a pipeline."""


class SpareWatch:
    """Makes an observer of each epoch that asks the workers beside the epoch's pipeline."""

    def __init__(
        self,
        stages: StageDirectory,
        *,
        on_unfit: Callable[[tuple[UnfitWorker, ...]], None],
        connect: rpc.Connect = rpc.connect,
        period_s: float = PERIOD_S,
    ) -> None:
        """`on_unfit` is called after each round, with all workers that do not fit."""
        self._stages = stages
        self._on_unfit = on_unfit
        self._connect = connect
        self._period_s = period_s
        self._unfit: tuple[UnfitWorker, ...] = ()

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "SparesOfEpoch":
        """Returns the observer of an epoch that is about to form."""
        return SparesOfEpoch(self, pipeline)

    async def run(self, pipeline: Pipeline) -> None:
        """Asks the workers beside a pipeline until cancelled."""
        while True:
            await self.ask_all(pipeline)
            await asyncio.sleep(self._period_s)

    async def ask_all(self, pipeline: Pipeline) -> None:
        """Asks each worker that is not in the pipeline once, and reports the workers that do not
        fit."""
        members = {member.address for member in pipeline.members}
        beside = [it for it in self._stages.addresses() if it not in members]
        answers = await asyncio.gather(*(self._ask(address) for address in beside))
        known = {offer.address: offer for offer in answers if offer is not None}
        said = unfit_beside(tuple(known.values()), traits_of(pipeline.first), pipeline.n_stages)
        unfit = tuple(UnfitWorker(it, known[it].answer.name, text) for it, text in said.items())
        log_new(self._unfit, unfit)
        self._unfit = unfit
        self._on_unfit(unfit)

    async def _ask(self, address: str) -> Offer | None:
        """Returns a worker's description of itself. Returns None if the worker does not answer."""
        async with self._connect(address, rpc.RECONNECT_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                answer = await stub.Describe(
                    worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return None
        return Offer(address, answer)


class SparesOfEpoch:
    """An iteration observer that watches the spares while its epoch serves."""

    def __init__(self, watch: SpareWatch, pipeline: Pipeline) -> None:
        self._watch = watch
        self._pipeline = pipeline
        self._asking: asyncio.Task[None] | None = None

    def opened(self) -> None:
        self._asking = asyncio.create_task(self._watch.run(self._pipeline), name="spare watch")

    def sent(self, batch: Batch, scheduler: Scheduler) -> None: ...

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None: ...

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def closed(self, loss: str | None) -> None:
        if self._asking is not None:
            self._asking.cancel()
