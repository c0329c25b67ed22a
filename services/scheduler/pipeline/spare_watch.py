"""Checks the workers that are in no pipeline while pipelines serve. A spare that does not fit could
not take over a stage, so it is reported before it is needed."""

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.asked_worker import DESCRIBE_TIMEOUT_S
from services.scheduler.pipeline.fit import traits_of
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.pipeline.muster import Offer, unfit_beside
from services.scheduler.pipeline.shortfall import UnfitWorker, log_new

PERIOD_S = 10.0
"""Seconds between two rounds of questions to the workers that are in no pipeline."""


class SpareWatch:
    """Asks the workers that are in no pipeline for their descriptions while any pipeline serves.
    An observer of each epoch tells it when the epoch's pipeline begins and stops serving."""

    def __init__(
        self,
        stages: StageDirectory,
        *,
        on_unfit: Callable[[tuple[UnfitWorker, ...]], None],
        connect: rpc.Connect = rpc.connect,
        period_s: float = PERIOD_S,
    ) -> None:
        """`on_unfit` is called after each round of questions, with all workers that do not fit."""
        self._stages = stages
        self._on_unfit = on_unfit
        self._connect = connect
        self._period_s = period_s
        self._unfit: tuple[UnfitWorker, ...] = ()
        self._serving: list[Pipeline] = []
        self._asking: asyncio.Task[None] | None = None  # while any pipeline serves

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "SparesOfEpoch":
        """Returns the observer of an epoch that is about to form."""
        return SparesOfEpoch(self, pipeline)

    def begin(self, pipeline: Pipeline) -> None:
        """Notes that a pipeline serves, and begins to ask the other workers, unless that has begun
        before."""
        self._serving.append(pipeline)
        if self._asking is None:
            self._asking = asyncio.create_task(self._run(), name="spare watch")

    def end(self, pipeline: Pipeline) -> None:
        """Notes that a pipeline no longer serves, and stops asking if no other pipeline serves.
        Does nothing if the pipeline has never served."""
        if pipeline in self._serving:
            self._serving.remove(pipeline)
        if not self._serving and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _run(self) -> None:
        while True:
            await self._ask_all()
            await asyncio.sleep(self._period_s)

    async def _ask_all(self) -> None:
        """Asks each worker that is in no pipeline once, and reports the workers that do not fit."""
        first = self._serving[0]
        members = {member.address for pipeline in self._serving for member in pipeline.members}
        beside = [it for it in self._stages.addresses() if it not in members]
        answers = await asyncio.gather(*(self._ask(address) for address in beside))
        known = {offer.address: offer for offer in answers if offer is not None}
        serving = {traits_of(pipeline.first) for pipeline in self._serving}
        taken = [process for pipeline in self._serving for process in pipeline.processes]
        said = unfit_beside(tuple(known.values()), serving, first.n_stages, taken=taken)
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
    """An iteration observer that notifies a `SpareWatch` when its epoch begins and stops
    serving."""

    def __init__(self, watch: SpareWatch, pipeline: Pipeline) -> None:
        self._watch = watch
        self._pipeline = pipeline

    def opened(self) -> None:
        self._watch.begin(self._pipeline)

    def sent(self, batch: Batch, scheduler: Scheduler) -> None: ...

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None: ...

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def late(self, reason: str, moved: Sequence[Request]) -> None: ...

    def closed(self, loss: str | None) -> None:
        self._watch.end(self._pipeline)
