"""The engine master: drives the stages of one epoch (Orca, section 4.1).

Plans go to stage 0 only, on one stream; the controllers forward them. Results come straight from
the last stage, on a stream opened by the master. Every stage reports timings and, however busy it
is, heartbeats. A stage that fails, disconnects or falls silent ends the epoch. An iteration that
does not return in the time that iterations of its size may take ends the epoch, too. Before that,
an iteration may be suspiciously late, and then the requests may go on in other pipelines.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from orcinus.v1 import trace_pb2, worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.scheduler.core.batch import Batch
from services.scheduler.pipeline.adapter_orders import AdapterOrders
from services.scheduler.pipeline.grammar_preparation import GrammarPreparation
from services.scheduler.pipeline.joining import Answers, Reports, join_all
from services.scheduler.pipeline.lateness import Late, Lateness
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.pipeline.pipeline_lost import PipelineLost
from services.scheduler.pipeline.plan import plan_of
from services.scheduler.pipeline.span_logprobs import LogprobPieces
from services.scheduler.pipeline.suspicion import Suspicion

log = logging.getLogger(__name__)

CAUSE_S = 0.25
"""Seconds to wait for the cause of a stage's loss. When a process dies, its peers may report a
broken connection before the process that watches it reports how it ended."""


class EngineMaster:
    """Sends the batches of one epoch to its stages, and takes the results. `wake` is called when
    `take_results` has results to return or an error to raise. `on_suspicion` is called when an
    iteration is suspiciously late. `Lateness` describes `suspicion` and `may_suspect`, and
    `join_all` describes `on_slow_join`. `on_leaving` is called at each heartbeat of a stage whose
    worker was asked to stop, with the stage's index and the seconds that the worker has left."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        wake: Callable[[], None],
        on_timing: Callable[[int, worker_pb2.IterationTiming], None],
        silence_limit_s: float,
        iteration_limit_s: float,
        hang_limit_s: float,
        on_leaving: Callable[[int, float], None] = lambda index, leaves_in_s: None,
        suspicion: Suspicion | None = None,
        may_suspect: Callable[[], bool] = lambda: False,
        on_suspicion: Callable[[str], None] = lambda reason: None,
        on_slow_join: Callable[[str], None] = lambda text: None,
        connect: rpc.Connect = rpc.connect,
        trace_of: Callable[[int], trace_pb2.TraceContext | None] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._wake = wake
        self._on_timing = on_timing
        self._on_suspicion = on_suspicion
        self._on_slow_join = on_slow_join
        self._trace_of = trace_of
        self._on_leaving = on_leaving
        self._lateness = Lateness(
            silence_limit_s=silence_limit_s,
            iteration_limit_s=iteration_limit_s,
            hang_limit_s=hang_limit_s,
            suspicion=suspicion,
            may_suspect=may_suspect,
        )
        self._channels = [
            connect(member.address, rpc.RECONNECT_OPTIONS) for member in pipeline.members
        ]
        self._stubs = [worker_pb2_grpc.WorkerServiceStub(channel) for channel in self._channels]
        self.grammars = GrammarPreparation(
            self._stubs[-1], pipeline.epoch, wake=wake, on_lost=self._lose
        )
        """Lets the last stage compile grammars."""
        self.adapters = AdapterOrders(pipeline, write=self._write, wake=wake)
        """Makes the ranks load and drop adapters."""
        self.joined: Answers = ()
        """The answers of the stages that have joined, about the keys and values that they have."""
        self._results: list[worker_pb2.IterationResult] = []
        self._logprobs = LogprobPieces()
        self._loss: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loses_soon: asyncio.TimerHandle | None = None

    async def start(self, *, wants_kept_blocks: bool = False) -> None:
        """Makes all stages join the epoch. `join_all` describes `wants_kept_blocks`.

        Raises:
            PipelineLost: a stage could not join.
        """
        watches, self.joined = await join_all(
            self.pipeline, self._stubs, wants_kept_blocks, on_slow=self._on_slow_join
        )
        metadata = rpc.epoch_metadata(self.pipeline.epoch)
        self._plans = self._stubs[0].RunIterations(metadata=metadata)
        self._lateness.begin(len(watches))
        self._tasks = [
            asyncio.create_task(self._watch(index, watch), name=f"watch stage {index}")
            for index, watch in enumerate(watches)
        ]
        lateness = self._lateness.watch(self._on_late)
        self._tasks.append(asyncio.create_task(lateness, name="watch lateness"))
        for task in self._tasks:
            task.add_done_callback(self._note_end)

    async def run(self, batch: Batch) -> None:
        """Sends one iteration into the pipeline, without waiting for its result.

        Raises:
            PipelineLost: the epoch is over, for example because stage 0 is gone.
        """
        self._lateness.note_sent(batch)
        trace = None if self._trace_of is None else self._trace_of(batch.iteration)
        await self._write(plan_of(batch, self.pipeline, trace))

    async def _write(self, message: worker_pb2.RunIterationsRequest) -> None:
        try:
            await self._plans.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._lose(f"stage 0 takes no more plans: {error}")
        except asyncio.CancelledError:
            # Either this task is cancelled, or `_lose` has cancelled the stream during the write.
            if self._loss is None:
                raise
        self._raise_if_lost()

    def take_results(self) -> list[worker_pb2.IterationResult]:
        """Returns the results that have come since the last call, in the order of their iterations.

        Raises:
            PipelineLost: the epoch is over.
            Exception: reading a report raised this unexpected error, which is a bug.
        """
        self._raise_if_lost()
        results, self._results = self._results, []
        return results

    async def close(self) -> None:
        """Stops watching the stages and closes the connections to them."""
        if self._loses_soon is not None:
            self._loses_soon.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.grammars.close()
        self.adapters.close()
        for channel in self._channels:
            await channel.close(grace=None)

    async def _watch(self, index: int, watch: Reports) -> None:
        try:
            while True:
                report = await watch.read()
                if not isinstance(report, worker_pb2.WatchStageResponse):
                    self._lose(f"stage {index} ended its reports", gone=index)
                    return
                self._lateness.note_report(index)
                self._take(index, report)
        except grpc.aio.AioRpcError as error:
            self._lose(f"stage {index} is gone: {error.details()}", gone=index)

    def _take(self, index: int, report: worker_pb2.WatchStageResponse) -> None:
        place = (report.pipeline_id, report.epoch)
        if place != (self.pipeline.pipeline_id, self.pipeline.epoch):
            log.warning("dropped a report of stage %d for another epoch: %s", index, place)
        elif report.HasField("result"):
            self._note_returned(report.result.iteration)
            self._on_timing(index, report.result.timing)
            self._results.append(self._logprobs.completed(report.result))
            self._wake()
        elif report.HasField("adapter"):
            self.adapters.note(index, report.adapter)
        elif report.HasField("logprobs"):
            self._logprobs.add(report.logprobs)
        elif report.HasField("timings"):
            for timing in report.timings.timings:
                self._on_timing(index, timing)
        elif report.HasField("heartbeat"):
            if report.heartbeat.leaves_in_ms:
                self._on_leaving(index, report.heartbeat.leaves_in_ms / 1000)
        elif report.HasField("failure"):
            self._note_failure(index, report.failure)

    def _note_failure(self, index: int, failure: worker_pb2.StageFailure) -> None:
        """Ends the epoch because a stage has failed. If the stage only reports that it lost another
        stage, the epoch ends after `CAUSE_S` with this reason, unless the cause is reported
        before."""
        if not failure.is_of_neighbour:
            self._lose(
                f"stage {index} failed: {failure.reason}",
                iteration=failure.iteration,
                is_by_itself=failure.is_by_itself,
            )
        elif self._loses_soon is None:
            lose = partial(self._lose, iteration=failure.iteration)
            reason = f"stage {index} lost another stage: {failure.reason}"
            self._loses_soon = asyncio.get_running_loop().call_later(CAUSE_S, lose, reason)

    def _note_returned(self, iteration: int) -> None:
        took_s = self._lateness.note_returned(iteration)
        if took_s is not None:
            epoch = self.pipeline.epoch
            log.info("epoch %d goes on: iteration %d took %.1f s", epoch, iteration, took_s)

    def _lose(self, reason: str, **details: Any) -> None:
        """Ends the epoch and logs `reason`. Does nothing if the epoch has ended. `details` are
        further arguments of `PipelineLost`."""
        if self._loss is None:
            log.error("epoch %d is over: %s", self.pipeline.epoch, reason)
            self._end(PipelineLost(reason, **details))

    def _on_late(self, late: Late) -> None:
        if not late.is_suspicion:
            self._lose(late.reason, gone=late.stage_index)
        elif self._loss is None:
            log.warning("epoch %d is late: %s", self.pipeline.epoch, late.reason)
            self._on_suspicion(late.reason)

    def _end(self, loss: Exception) -> None:
        self._loss = loss
        self._plans.cancel()
        self._wake()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        # `take_results` raises the error, so that a bug here does not look like a silent stage.
        if not task.cancelled() and (error := task.exception()) is not None and not self._loss:
            self._end(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise self._loss
