"""The engine master: drives the stages of one epoch (Orca, section 4.1).

Plans go to stage 0 only, on one stream; the controllers forward them. Results come straight from
the last stage, on a stream opened by the master. Every stage reports timings and, however busy it
is, signs of life; one that fails, goes away or falls silent ends the epoch, and so does an
iteration that does not return in the time that iterations of its size may take.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import grpc
import grpc.aio
from orcinus.v1 import trace_pb2, worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.common.errors import Unavailable
from services.common.iteration_limit import IterationLimit, Work
from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.request import Request, RequestId
from services.scheduler.pipeline.membership import Pipeline

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0

WATCH_S = 0.5
"""Interval of the looks for what is missing."""


class PipelineLost(Unavailable):
    """Raised when the epoch is over: a stage is gone, or an iteration does not return."""

    def __init__(self, message: str, *, culprits: Sequence[RequestId] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)
        """Ids of the requests for which the epoch ended, where it is known: their logits are not
        finite, and those of others in their batch are. They would end the next one, too."""


class EngineMaster:
    """The engine master of one epoch. `wake` is called whenever `take_results` has something new to
    say."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        wake: Callable[[], None],
        on_timing: Callable[[int, worker_pb2.IterationTiming], None],
        silence_limit_s: float,
        iteration_limit_s: float,
        hang_limit_s: float,
        connect: rpc.Connect = rpc.connect,
        trace_of: Callable[[int], trace_pb2.TraceContext | None] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._wake = wake
        self._on_timing = on_timing
        self._trace_of = trace_of
        self._silence_limit_s = silence_limit_s
        self._limit = IterationLimit(floor_s=hang_limit_s, ceiling_s=iteration_limit_s)
        self._channels = [connect(member.address) for member in pipeline.members]
        self._stubs = [worker_pb2_grpc.WorkerServiceStub(channel) for channel in self._channels]
        # Seconds in which this process has run: what is reported while it is stopped, or starved,
        # lies unread, and nobody is silent.
        self._now_s = 0.0
        self._last_report: list[float] = []  # by that clock
        self._results: list[worker_pb2.IterationResult] = []
        self._logprobs: list[worker_pb2.SpanLogprobs] = []  # of the iteration that returns next
        self._sent: dict[int, _Sent] = {}  # the iterations that have not returned
        self._returned_at = 0.0  # the last one that has, by the loop's clock
        self._returned_at_s = 0.0  # and by the other one
        self._loss: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Forms the epoch on all stages.

        Raises:
            PipelineLost: a stage could not join.
        """
        try:
            await asyncio.gather(*(self._join(index) for index in range(self.pipeline.n_stages)))
            metadata = rpc.epoch_metadata(self.pipeline.epoch)
            watches = [
                stub.WatchStage(worker_pb2.WatchStageRequest(), metadata=metadata)
                for stub in self._stubs
            ]
            for watch in watches:
                await asyncio.wait_for(watch.wait_for_connection(), JOIN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise PipelineLost(f"the pipeline did not form: {error.details()}") from error
        except TimeoutError:
            raise PipelineLost("the pipeline did not form: a stage does not report") from None
        self._plans = self._stubs[0].RunIterations(metadata=metadata)
        self._last_report = [self._now_s] * len(watches)
        self._tasks = [
            asyncio.create_task(self._watch(index, watch), name=f"watch stage {index}")
            for index, watch in enumerate(watches)
        ]
        self._tasks.append(asyncio.create_task(self._watch_silence(), name="watch silence"))
        for task in self._tasks:
            task.add_done_callback(self._note_end)

    async def run(self, batch: Batch) -> None:
        """Sends one iteration into the pipeline, without waiting for its result.

        Raises:
            PipelineLost: stage 0 is gone.
        """
        now = asyncio.get_running_loop().time()
        self._sent[batch.iteration] = _Sent(batch, now, self._now_s)
        trace = None if self._trace_of is None else self._trace_of(batch.iteration)
        try:
            await self._plans.write(plan_of(batch, self.pipeline, trace))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._lose(f"stage 0 takes no more plans: {error}")
        except asyncio.CancelledError:
            # Either we are cancelled, or `_lose` has cancelled the stream under a write that waits.
            if self._loss is None:
                raise
        self._raise_if_lost()

    def take_results(self) -> list[worker_pb2.IterationResult]:
        """Returns the results that have come since the last call, in the order of their iterations.

        Raises:
            PipelineLost: the epoch is over.
            Exception: a report could not be taken in, which is a bug.
        """
        self._raise_if_lost()
        results, self._results = self._results, []
        return results

    async def close(self) -> None:
        """Ends the epoch from this side."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close(grace=None)

    async def _join(self, index: int) -> None:
        pipeline = self.pipeline
        await self._stubs[index].JoinPipeline(
            worker_pb2.JoinPipelineRequest(
                pipeline_id=pipeline.pipeline_id,
                epoch=pipeline.epoch,
                stage_index=index,
                members=[member.address for member in pipeline.members],
                rendezvous_address=pipeline.first.rendezvous_address,
                tp_size=pipeline.first.tp_size,
                n_kv_blocks=pipeline.n_kv_blocks,
            ),
            timeout=JOIN_TIMEOUT_S,
        )

    async def _watch(self, index: int, watch: grpc.aio.UnaryStreamCall[object, object]) -> None:
        try:
            while True:
                report = await watch.read()
                if not isinstance(report, worker_pb2.WatchStageResponse):
                    self._lose(f"stage {index} ended its reports")
                    return
                self._last_report[index] = self._now_s
                self._take(index, report)
        except grpc.aio.AioRpcError as error:
            self._lose(f"stage {index} is gone: {error.details()}")

    def _take(self, index: int, report: worker_pb2.WatchStageResponse) -> None:
        place = (report.pipeline_id, report.epoch)
        if place != (self.pipeline.pipeline_id, self.pipeline.epoch):
            log.warning("dropped a report of stage %d for another epoch: %s", index, place)
        elif report.HasField("result"):
            self._note_return(report.result.iteration)
            self._on_timing(index, report.result.timing)
            if self._logprobs:
                pieces = [*self._logprobs, *report.result.logprobs]
                del report.result.logprobs[:]
                report.result.logprobs.extend(pieces)
                self._logprobs.clear()
            self._results.append(report.result)
            self._wake()
        elif report.HasField("logprobs"):
            self._logprobs.extend(report.logprobs.logprobs)
        elif report.HasField("timings"):
            for timing in report.timings.timings:
                self._on_timing(index, timing)
        elif report.HasField("failure"):
            self._lose(
                f"stage {index} failed: {report.failure.reason}",
                culprits=self._culprits(report.failure),
            )

    def _note_return(self, iteration: int) -> None:
        now = asyncio.get_running_loop().time()
        sent = self._sent.pop(iteration, None)
        if sent is not None:
            self._limit.learn(sent.work(), now - max(sent.at, self._returned_at))
        self._returned_at, self._returned_at_s = now, self._now_s

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        ticked_at = loop.time()
        pause_s = min(WATCH_S, self._silence_limit_s / 4, self._limit.ceiling_s / 4)
        while self._loss is None:
            await asyncio.sleep(pause_s)
            before, ticked_at = ticked_at, loop.time()
            self._now_s += min(ticked_at - before, 2 * pause_s)
            for index, last in enumerate(self._last_report):
                if self._now_s - last > self._silence_limit_s:
                    self._lose(f"stage {index} has been silent for {self._silence_limit_s:g} s")
            sent = next(iter(self._sent.values()), None)
            if sent is None:
                continue
            limit_s = self._limit.of(sent.work())
            # An iteration may have waited for the one before it to return.
            if self._now_s - max(sent.at_s, self._returned_at_s) > limit_s:
                iteration = sent.batch.iteration
                self._lose(f"iteration {iteration} has not returned in {limit_s:.1f} s")

    def _culprits(self, failure: worker_pb2.StageFailure) -> list[RequestId]:
        """Returns the ids of the requests that failed, unless all of the batch did: then nobody
        knows whether it was one of them or the stage."""
        sent = self._sent.get(failure.iteration)
        if sent is None:
            return []
        sampled = [span.request.request_id for span in sent.batch.spans if span.is_sampled]
        failed = [sampled[place] for place in failure.failed_spans if place < len(sampled)]
        return failed if len(failed) < len(sampled) else []

    def _lose(self, reason: str, *, culprits: Sequence[RequestId] = ()) -> None:
        if self._loss is None:
            of_whom = f", of requests {', '.join(culprits)}" if culprits else ""
            log.error("epoch %d is over: %s%s", self.pipeline.epoch, reason, of_whom)
            self._end(PipelineLost(reason, culprits=culprits))

    def _end(self, loss: Exception) -> None:
        self._loss = loss
        self._plans.cancel()
        self._wake()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        # A bug in a watch must not look like a silent stage: whoever asks for results gets it.
        if not task.cancelled() and (error := task.exception()) is not None and not self._loss:
            self._end(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise self._loss


@dataclass(frozen=True, slots=True)
class _Sent:
    """An iteration on its way."""

    batch: Batch
    at: float  # by the loop's clock
    at_s: float  # by the master's `_now_s`

    def work(self) -> Work:
        columns = self.batch.columns
        return Work.of(columns.start_positions, columns.n_tokens)


def plan_of(
    batch: Batch, pipeline: Pipeline, trace: trace_pb2.TraceContext | None = None
) -> worker_pb2.RunIterationsRequest:
    """Returns the batch as it travels: packed columns of what the ranks do not know yet, and the
    span of an iteration that is recorded."""
    columns, n_groups = batch.columns, len(pipeline.kv_windows)
    rows = _rows(columns.requests)
    plan = worker_pb2.RunIterationsRequest(
        pipeline_id=pipeline.pipeline_id,
        epoch=pipeline.epoch,
        iteration=batch.iteration,
        released_rows=batch.released_rows,
        trace=trace,
        row=rows,
        start_position=columns.start_positions,
        n_tokens=columns.n_tokens,
        sample=columns.is_sampled,
        n_new_blocks=[len(ids) // n_groups if ids else 0 for ids in columns.new_block_ids],
        token_on_rank=[not known for known in columns.token_ids],
        token_ids=list(chain.from_iterable(columns.token_ids)),
        new_block_ids=list(chain.from_iterable(columns.new_block_ids)),
    )
    if batch.n_drafts:
        plan.n_drafts.extend(columns.n_drafts)
    for row, span in compress(zip(rows, batch.spans, strict=True), columns.is_admission):
        admission = plan.admissions.add(row=row, n_prompt_tokens=span.request.n_prompt_tokens)
        admission.sampling.MergeFromString(span.request.sampling)
        if span.start_position:
            admission.stored_token_ids.extend(span.request.span(0, span.start_position))
        _ask_logprobs(admission, span.request)
    for request, span in zip(columns.requests, batch.spans, strict=True):
        if request.n_prompt_logprobs is not None:
            plan.next_token_ids.extend(_next_token_ids(span))
    return plan


def _ask_logprobs(admission: worker_pb2.Admission, request: Request) -> None:
    if request.n_logprobs is not None:
        admission.n_logprobs = request.n_logprobs
    if request.wants_prompt_logprobs:
        admission.n_prompt_logprobs = request.n_prompt_logprobs or 0


def _next_token_ids(span: Span) -> Sequence[int]:
    """Returns the token after a span that ends within a prompt whose log-probabilities are wanted;
    the rank, which is to say how likely it is, has not seen it yet."""
    end, prompt = span.start_position + span.n_tokens, span.request.prompt_token_ids
    return prompt[end : end + 1] if span.request.wants_prompt_logprobs else ()


def _rows(requests: Sequence[Request]) -> list[int]:
    """Returns the rows of requests on the ranks, each of which must have one."""
    rows = [one.reservation.row for one in requests if one.reservation is not None]
    if len(rows) < len(requests):
        raise ValueError("a request runs without a reservation")
    return rows
