"""What a scheduler counts: its requests and its iterations, as their observer, and the pool and the
K/V memory, which are looked at when Prometheus asks.

A request that is accepted finishes, is cancelled or fails, once, and so do the counters: at rest
the first equals the sum of the others. The gauges are those that the Gateway API's inference
extension reads; without a pipeline they are 0.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orcinus.v1 import scheduler_pb2, worker_pb2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from services.common import semconv
from services.common.errors import InvalidRequest, OrcinusError, PoolFull
from services.common.metrics import LONG_S, SHORT_S
from services.scheduler.core.batch import Batch
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import Scheduler, Update
from services.scheduler.pipeline.membership import Pipeline

TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}
FAILED = "failed"
REJECTIONS = ("invalid", "pool_full", "unavailable")

MAX_UNTIMED = 4096
"""Iterations that wait for timings, at most."""


class SchedulerMetrics:
    """All metrics of one scheduler process."""

    def __init__(
        self, registry: CollectorRegistry, *, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._clock_ns = clock_ns
        self.requests = RequestMetrics(registry)
        self._iterations = IterationMetrics(registry)
        self._pipeline = PipelineMetrics(registry)
        self._leader = Gauge(semconv.LEADER, "1 while this scheduler leads.", registry=registry)

    def set_leading(self, is_leading: bool) -> None:
        """Whether this scheduler leads."""
        self._leader.set(is_leading)

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "EpochObserver":
        """The observer of an epoch that is about to form."""
        return EpochObserver(pipeline, scheduler, self._pipeline, self._iterations, self._clock_ns)


class RequestMetrics:
    """Requests, one by one: the request observer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._arrived_at: dict[Request, float] = {}  # of those that have not run
        self._accepted = Counter(
            semconv.REQUESTS_ACCEPTED, "Requests taken into the pool.", registry=registry
        )
        finished = Counter(
            semconv.REQUESTS_FINISHED,
            "Requests that ran to their end.",
            ["reason"],
            registry=registry,
        )
        self._ended = {
            FinishReason.STOP: finished.labels("stop"),
            FinishReason.LENGTH: finished.labels("length"),
            FinishReason.CANCELLED: Counter(
                semconv.REQUESTS_CANCELLED, "Requests that were given up.", registry=registry
            ),
        }
        self._failed = Counter(
            semconv.REQUESTS_FAILED, "Requests that ended as UNAVAILABLE.", registry=registry
        )
        rejected = Counter(
            semconv.REQUESTS_REJECTED,
            "Requests not taken into the pool.",
            ["reason"],
            registry=registry,
        )
        self._rejected = {reason: rejected.labels(reason) for reason in REJECTIONS}
        self._queue_time = Histogram(
            semconv.REQUEST_QUEUE_TIME,
            "From the pool into the first batch.",
            buckets=LONG_S,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            semconv.PROMPT_TOKENS, "Prompt tokens of requests that came to run.", registry=registry
        )
        prompt = Histogram(
            semconv.REQUEST_PROMPT_TOKENS,
            "Prompt tokens of a request that is over.",
            ["reason"],
            buckets=TOKENS,
            registry=registry,
        )
        generation = Histogram(
            semconv.REQUEST_GENERATION_TOKENS,
            "Generated tokens of a request that is over.",
            ["reason"],
            buckets=TOKENS,
            registry=registry,
        )
        self._lengths = {
            reason: (prompt.labels(reason), generation.labels(reason))
            for reason in (*REASONS.values(), FAILED)
        }

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None:
        self._accepted.inc()
        self._arrived_at[request] = time.perf_counter()

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None:
        self._rejected[_rejection(error)].inc()

    def admitted(self, request: Request) -> None:
        self._queue_time.observe(time.perf_counter() - self._arrived_at.pop(request))
        self._prompt_tokens.inc(request.n_prompt_tokens)

    def first_token(self, request: Request) -> None:
        """The frontend measures it, where clients do."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._ended[reason].inc()
        self._take_leave(request, REASONS[reason])

    def failed(self, request: Request) -> None:
        self._failed.inc()
        self._take_leave(request, FAILED)

    def _take_leave(self, request: Request, reason: str) -> None:
        self._arrived_at.pop(request, None)
        prompt, generation = self._lengths[reason]
        prompt.observe(request.n_prompt_tokens)
        generation.observe(len(request.generated_token_ids))


class PipelineMetrics:
    """The pipeline, its pool and its K/V memory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.scheduler: Scheduler | None = None
        """That of the pipeline that serves, if one does."""
        self.up = Gauge(
            semconv.PIPELINE_UP, "1 while there is a pipeline that serves.", registry=registry
        )
        self.epoch = Gauge(
            semconv.PIPELINE_EPOCH, "Epoch of the last pipeline that formed.", registry=registry
        )
        self.formed = Counter(
            semconv.EPOCHS_FORMED, "Pipelines that have formed.", registry=registry
        )
        self.not_formed = Counter(
            semconv.EPOCHS_NOT_FORMED, "Pipelines that were to form and did not.", registry=registry
        )
        self.losses = Counter(
            semconv.PIPELINE_LOSSES,
            "Pipelines that were lost while they served.",
            registry=registry,
        )
        self.cache_config = Info(
            semconv.CACHE_CONFIG.removesuffix("_info"),
            "Shape of the K/V memory of the last pipeline.",
            registry=registry,
        )
        for name, text, read in (
            (semconv.REQUESTS_WAITING, "Requests that have never run.", _n_waiting),
            (semconv.REQUESTS_RUNNING, "Requests that have run and have not ended.", _n_running),
            (semconv.KV_CACHE_USAGE, "Share of K/V memory that is reserved.", _reserved_ratio),
            (semconv.KV_CACHE_ALLOCATED, "Share of K/V memory that is in use.", _allocated_ratio),
        ):
            Gauge(name, text, registry=registry).set_function(partial(self._read, read))

    def _read(self, read: Callable[[Scheduler], float]) -> float:
        """Called from the thread that answers Prometheus."""
        scheduler = self.scheduler
        return 0 if scheduler is None else read(scheduler)


class IterationMetrics:
    """Iterations of all epochs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.time = Histogram(
            semconv.ITERATION_TIME,
            "From the plan's departure to the return of its tokens.",
            buckets=SHORT_S,
            registry=registry,
        )
        self.overhead = Histogram(
            semconv.ITERATION_OVERHEAD,
            "An iteration's time in the pipeline less what its stages computed.",
            buckets=SHORT_S,
            registry=registry,
        )
        self.batch_size = Histogram(
            semconv.BATCH_SIZE, "Requests in a batch.", buckets=BATCH_SIZES, registry=registry
        )
        self.batch_tokens = Histogram(
            semconv.BATCH_TOKENS, "Tokens in a batch.", buckets=TOKENS, registry=registry
        )
        self.generated = Counter(
            semconv.GENERATION_TOKENS, "Tokens that were generated.", registry=registry
        )
        self._compute = Histogram(
            semconv.STAGE_COMPUTE,
            "What a stage computed for an iteration.",
            ["stage"],
            buckets=SHORT_S,
            registry=registry,
        )
        self._receive = Histogram(
            semconv.STAGE_RECEIVE,
            "What a stage waited for the activations of an iteration.",
            ["stage"],
            buckets=SHORT_S,
            registry=registry,
        )
        self._send = Histogram(
            semconv.STAGE_SEND,
            "What handing on the activations of an iteration took a stage.",
            ["stage"],
            buckets=SHORT_S,
            registry=registry,
        )

    def of_stage(self, index: int, n_stages: int) -> "StageTimes":
        """The histograms of one stage; the first receives nothing, and the last sends nothing."""
        stage = str(index)
        return StageTimes(
            compute=self._compute.labels(stage),
            receive=self._receive.labels(stage) if index > 0 else None,
            send=self._send.labels(stage) if index + 1 < n_stages else None,
        )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The histograms of one stage."""

    compute: Histogram
    receive: Histogram | None
    send: Histogram | None

    def observe(self, timing: worker_pb2.IterationTiming) -> None:
        self.compute.observe(timing.compute_ns / 1e9)
        if self.receive is not None:
            self.receive.observe(timing.receive_ns / 1e9)
        if self.send is not None:
            self.send.observe(timing.send_ns / 1e9)


@dataclass(slots=True)
class _Iteration:
    """An iteration until its result and the timings of all stages are in."""

    sent_ns: int
    in_pipeline_ns: int | None = None
    """From when it was sent and there was room for it, to its return."""
    compute_ns: int = 0
    n_timings: int = 0


class EpochObserver:
    """One epoch: the iteration observer."""

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        metrics: PipelineMetrics,
        iterations: IterationMetrics,
        clock_ns: Callable[[], int],
    ) -> None:
        self._clock_ns = clock_ns
        self._epoch = pipeline.epoch
        self._scheduler = scheduler
        self._metrics = metrics
        self._iterations = iterations
        n_stages = pipeline.n_stages
        self._stages = [iterations.of_stage(index, n_stages) for index in range(n_stages)]
        self._untimed: dict[int, _Iteration] = {}
        self._returned_ns = deque([0] * n_stages, maxlen=n_stages)  # of the last iterations
        self._has_opened = False

    def opened(self) -> None:
        kv_manager = self._scheduler.kv_manager
        metrics = self._metrics
        metrics.scheduler = self._scheduler
        metrics.cache_config.info(
            {"block_size": str(kv_manager.block_size), "num_gpu_blocks": str(kv_manager.n_blocks)}
        )
        metrics.epoch.set(self._epoch)
        metrics.formed.inc()
        metrics.up.set(1)
        self._has_opened = True

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        self._untimed[batch.iteration] = _Iteration(self._clock_ns())
        if len(self._untimed) > MAX_UNTIMED:
            del self._untimed[next(iter(self._untimed))]
        self._iterations.batch_size.observe(len(batch.spans))
        self._iterations.batch_tokens.observe(sum([span.n_tokens for span in batch.spans]))

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        self._iterations.generated.inc(sum([update.token_id is not None for update in updates]))
        now_ns = self._clock_ns()
        # As many iterations as stages are under way; another one waits for the first to return.
        had_room_ns = self._returned_ns[0]
        self._returned_ns.append(now_ns)
        entry = self._untimed.get(iteration)
        if entry is not None:
            entry.in_pipeline_ns = now_ns - max(entry.sent_ns, had_room_ns)
            self._iterations.time.observe((now_ns - entry.sent_ns) / 1e9)
            self._note_overhead(iteration, entry)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        self._stages[stage_index].observe(timing)
        entry = self._untimed.get(timing.iteration)
        if entry is not None:
            entry.compute_ns += timing.compute_ns
            entry.n_timings += 1
            self._note_overhead(timing.iteration, entry)

    def closed(self, loss: str | None) -> None:
        metrics = self._metrics
        metrics.scheduler = None
        metrics.up.set(0)
        if loss is not None:
            (metrics.losses if self._has_opened else metrics.not_formed).inc()

    def _note_overhead(self, iteration: int, entry: _Iteration) -> None:
        if entry.in_pipeline_ns is None or entry.n_timings < len(self._stages):
            return
        del self._untimed[iteration]
        # A stage prepares while another computes, so together they may compute longer than it took.
        overhead_ns = max(0, entry.in_pipeline_ns - entry.compute_ns)
        self._iterations.overhead.observe(overhead_ns / 1e9)


def _rejection(error: OrcinusError) -> str:
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "pool_full" if isinstance(error, PoolFull) else "unavailable"


def _n_waiting(scheduler: Scheduler) -> float:
    return scheduler.pool.n_waiting


def _n_running(scheduler: Scheduler) -> float:
    return scheduler.pool.n_running


def _reserved_ratio(scheduler: Scheduler) -> float:
    return scheduler.kv_manager.n_reserved_slots / scheduler.kv_manager.n_slots


def _allocated_ratio(scheduler: Scheduler) -> float:
    return scheduler.kv_manager.n_allocated_slots / scheduler.kv_manager.n_slots
