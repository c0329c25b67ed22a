"""Histograms of iterations, kept by an iteration observer for each epoch."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orcinus.v1 import worker_pb2
from prometheus_client import CollectorRegistry

from services.common import semconv
from services.common.metrics import BATCH_SIZES, ITERATION_S, TOKENS
from services.common.own_metrics import Counter, Distribution, Histogram
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.pipeline_metrics import PipelineMetrics
from services.scheduler.pipeline.membership import Pipeline

MAX_UNTIMED = 4096
"""Largest number of iterations that wait for the timings of their stages."""


class PrefixCacheMetrics:
    """Counters of the prefix caches of all epochs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queried = Counter(
            semconv.PREFIX_CACHE_QUERIED,
            "Tokens of admitted requests that were looked for in the prefix cache.",
            registry=registry,
        )
        self._hits = Counter(
            semconv.PREFIX_CACHE_HITS,
            "Tokens that the prefix cache had, and that were not computed.",
            registry=registry,
        )
        self._evicted = Counter(
            semconv.PREFIX_CACHE_EVICTED,
            "Blocks that the prefix cache gave up to requests.",
            registry=registry,
        )

    def add(self, queried: int, hits: int, evicted: int) -> None:
        """Adds the numbers of tokens looked up, tokens found and blocks evicted."""
        self._queried.inc(queried)
        self._hits.inc(hits)
        self._evicted.inc(evicted)


class IterationMetrics:
    """Histograms of the iterations of all epochs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.time = Histogram(
            semconv.ITERATION_TIME,
            "From the plan's departure to the return of its tokens.",
            buckets=ITERATION_S,
            registry=registry,
        )
        self.overhead = Histogram(
            semconv.ITERATION_OVERHEAD,
            "An iteration's time in the pipeline less what its stages computed.",
            buckets=ITERATION_S,
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
        self.drafted = Counter(
            semconv.DRAFTED_TOKENS, "Drafts of tokens that were verified.", registry=registry
        )
        self.accepted = Counter(
            semconv.ACCEPTED_TOKENS, "Drafts of tokens that were right.", registry=registry
        )
        self.prefix_cache = PrefixCacheMetrics(registry)
        self._compute = Histogram(
            semconv.STAGE_COMPUTE,
            "What a stage computed for an iteration.",
            ["stage"],
            buckets=ITERATION_S,
            registry=registry,
        )
        self._receive = Histogram(
            semconv.STAGE_RECEIVE,
            "What a stage waited for the activations of an iteration.",
            ["stage"],
            buckets=ITERATION_S,
            registry=registry,
        )
        self._send = Histogram(
            semconv.STAGE_SEND,
            "What handing on the activations of an iteration took a stage.",
            ["stage"],
            buckets=ITERATION_S,
            registry=registry,
        )

    def of_stage(self, index: int, n_stages: int) -> "StageTimes":
        """Returns the histograms of one stage. The first stage receives nothing, and the last stage
        sends nothing."""
        stage = str(index)
        return StageTimes(
            compute=self._compute.labels(stage),
            receive=self._receive.labels(stage) if index > 0 else None,
            send=self._send.labels(stage) if index + 1 < n_stages else None,
        )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Histograms of one stage: seconds of computing, receiving and sending."""

    compute: Distribution
    receive: Distribution | None
    send: Distribution | None

    def observe(self, timing: worker_pb2.IterationTiming) -> None:
        self.compute.observe(timing.compute_ns / 1e9)
        if self.receive is not None:
            self.receive.observe(timing.receive_ns / 1e9)
        if self.send is not None:
            self.send.observe(timing.send_ns / 1e9)


@dataclass(slots=True)
class _Iteration:
    """An iteration whose result, or whose timing from some stage, has not come yet."""

    sent_ns: int
    in_pipeline_ns: int | None = None
    """Nanoseconds from the start of the iteration to its return. An iteration starts when it has
    been sent and the pipeline has room for it."""
    compute_ns: int = 0
    n_timings: int = 0


class EpochObserver:
    """An iteration observer that keeps the metrics of one epoch."""

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
        self._number = pipeline.number
        self._scheduler = scheduler
        self._metrics = metrics
        self._iterations = iterations
        n_stages = pipeline.n_stages
        self._stages = [iterations.of_stage(index, n_stages) for index in range(n_stages)]
        self._untimed: dict[int, _Iteration] = {}
        self._returned_ns = deque([0] * n_stages, maxlen=n_stages)  # when iterations returned
        self._has_opened = False
        self._n_queried = self._n_hits = self._n_evicted = 0  # already counted
        self._n_drafted = self._n_accepted = 0  # already counted
        metrics.forming.inc()

    def opened(self) -> None:
        metrics = self._metrics
        metrics.forming.dec()
        metrics.open(self._number, self._scheduler)
        metrics.epoch.set(self._epoch)
        metrics.formed.inc()
        self._has_opened = True

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        self._untimed[batch.iteration] = _Iteration(self._clock_ns())
        if len(self._untimed) > MAX_UNTIMED:
            del self._untimed[next(iter(self._untimed))]
        self._iterations.batch_size.observe(len(batch.spans))
        self._iterations.batch_tokens.observe(batch.n_tokens)
        self._note_cache(scheduler.kv_manager)

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        self._iterations.generated.inc(sum([update.token_id is not None for update in updates]))
        if scheduler.drafter is not None and scheduler.drafter.n_drafted > self._n_drafted:
            self._note_drafts(scheduler.drafter)
        now_ns = self._clock_ns()
        # The pipeline has room for one iteration in each stage; a further one waits for a return.
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

    def late(self, reason: str, moved: Sequence[Request]) -> None:
        self._metrics.late.inc()

    def closed(self, loss: str | None) -> None:
        metrics = self._metrics
        metrics.close(self._number, self._scheduler)
        if not self._has_opened:
            metrics.forming.dec()
        if loss is not None:
            (metrics.losses if self._has_opened else metrics.not_formed).inc()

    def _note_cache(self, kv_manager: KVManager) -> None:
        cache, evicted = kv_manager.prefix_cache, kv_manager.blocks.n_evicted
        queried = cache.n_queried_tokens
        if queried == self._n_queried and evicted == self._n_evicted:
            return
        hits = cache.n_cached_tokens
        self._iterations.prefix_cache.add(
            queried - self._n_queried, hits - self._n_hits, evicted - self._n_evicted
        )
        self._n_queried, self._n_hits, self._n_evicted = queried, hits, evicted

    def _note_drafts(self, drafter: Drafter) -> None:
        drafted, accepted = drafter.n_drafted, drafter.n_accepted
        self._iterations.drafted.inc(drafted - self._n_drafted)
        self._iterations.accepted.inc(accepted - self._n_accepted)
        self._n_drafted, self._n_accepted = drafted, accepted

    def _note_overhead(self, iteration: int, entry: _Iteration) -> None:
        if entry.in_pipeline_ns is None or entry.n_timings < len(self._stages):
            return
        del self._untimed[iteration]
        # Stages may compute at once: the sum of their times may exceed the iteration's time.
        overhead_ns = max(0, entry.in_pipeline_ns - entry.compute_ns)
        self._iterations.overhead.observe(overhead_ns / 1e9)
