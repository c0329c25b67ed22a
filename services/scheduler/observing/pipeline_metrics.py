"""Metrics of the pipelines: their epochs, and gauges of the pool and of the K/V memory.

The gauges of the pool and of the K/V memory are computed when Prometheus reads them. Each describes
all serving pipelines together. Without a pipeline they are 0, except the gauges of waiting
requests. The inference extension of the Gateway API reads these gauges.
"""

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from services.common import semconv
from services.scheduler.core.admission.adapter_gate import LOAD_ENDS
from services.scheduler.core.admission.waiting import PRIORITY_KINDS
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler


class PipelineMetrics:
    """Metrics of the pipelines, their pool and their K/V memory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._schedulers: dict[int, Scheduler] = {}  # of the pipelines that serve, by number
        self.pool: RequestPool | None = None
        """The pool of requests, which outlives pipelines; None before the first pipeline."""
        Gauge(
            semconv.PIPELINE_UP, "1 while there is a pipeline that serves.", registry=registry
        ).set_function(lambda: bool(self._schedulers))
        Gauge(semconv.PIPELINES, "Pipelines that serve.", registry=registry).set_function(
            lambda: len(self._schedulers)
        )
        Gauge(
            semconv.PIPELINES_DRAINING,
            "Of these, those that are to end, since a worker of them is leaving.",
            registry=registry,
        ).set_function(lambda: sum(one.is_draining for one in self._schedulers.values()))
        self.wanted = Gauge(
            semconv.PIPELINES_WANTED,
            "Pipelines that there are to be: by the autoscaler, or else by the known workers.",
            registry=registry,
        )
        self.queued = Gauge(
            semconv.TOKENS_QUEUED,
            "Tokens of waiting requests that are to be computed before their next new token.",
            registry=registry,
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
        self.forming = Gauge(
            semconv.PIPELINES_FORMING, "Pipelines whose stages join.", registry=registry
        )
        self.late = Counter(
            semconv.PIPELINES_LATE,
            "Times that a pipeline was late and its requests went on in others.",
            registry=registry,
        )
        loads = Counter(
            semconv.ADAPTER_LOADS,
            "Loads of adapters on the ranks of a pipeline, for clients and for requests.",
            ["outcome"],
            registry=registry,
        )
        self.adapter_loads = {end: loads.labels(end) for end in LOAD_ENDS}
        """For each way in which a load of an adapter may end, the counter of such loads."""
        self._cache_config = Info(
            semconv.CACHE_CONFIG.removesuffix("_info"),
            "Shape of the K/V memory of all pipelines together.",
            registry=registry,
        )
        self._add_pool_gauges(registry)

    def open(self, number: int, scheduler: Scheduler) -> None:
        """Notes the scheduling core of a pipeline that serves from now on."""
        self._schedulers = self._schedulers | {number: scheduler}
        self.pool = scheduler.pool
        self._describe_memory()

    def close(self, number: int, scheduler: Scheduler) -> None:
        """Removes the scheduling core of a pipeline that no longer serves. Does nothing if the
        pipeline has never served."""
        if self._schedulers.get(number) is scheduler:
            self._schedulers = {n: one for n, one in self._schedulers.items() if n != number}
            self._describe_memory()

    def _add_pool_gauges(self, registry: CollectorRegistry) -> None:
        """Adds the gauges of the pool and of the K/V memory."""
        Gauge(
            semconv.REQUESTS_WAITING,
            "Requests that wait to run, or to run again.",
            registry=registry,
        ).set_function(lambda: 0 if self.pool is None else self.pool.n_waiting)
        by_priority = Gauge(
            semconv.REQUESTS_WAITING_BY_PRIORITY,
            "Of these, those whose priority is below 0 (raised), 0 and above (lowered).",
            ["priority"],
            registry=registry,
        )
        for kind in PRIORITY_KINDS:
            by_priority.labels(kind).set_function(partial(self._n_waiting_of, kind))
        for name, text, read in (
            (semconv.REQUESTS_RUNNING, "Requests that have run and have not ended.", _n_running),
            (semconv.KV_CACHE_USAGE, "Share of K/V memory that is reserved.", _reserved_ratio),
            (semconv.KV_CACHE_ALLOCATED, "Share of K/V memory that is in use.", _allocated_ratio),
            (
                semconv.PREFIX_CACHE_UNUSED,
                "Share of K/V memory that no request uses and the prefix cache keeps.",
                _unused_ratio,
            ),
        ):
            Gauge(name, text, registry=registry).set_function(partial(self._read, read))

    def _describe_memory(self) -> None:
        """Sets the metric of the size of the K/V memory. The last size is kept while no pipeline
        serves."""
        managers = [one.kv_manager for one in self._schedulers.values()]
        if managers:
            n_blocks = sum(manager.n_blocks for manager in managers)
            block_size = str(managers[0].block_size)
            self._cache_config.info({"block_size": block_size, "num_gpu_blocks": str(n_blocks)})

    def _n_waiting_of(self, kind: str) -> float:
        return 0 if self.pool is None else self.pool.waiting.n_of(kind)

    def _read(self, read: Callable[[Sequence[Scheduler]], float]) -> float:
        """Returns a gauge's value. This method is called from the thread that answers
        Prometheus."""
        schedulers = tuple(self._schedulers.values())
        return read(schedulers) if schedulers else 0


def _n_running(schedulers: Sequence[Scheduler]) -> float:
    return sum(one.pool.n_running for one in schedulers)


def _reserved_ratio(schedulers: Sequence[Scheduler]) -> float:
    return sum(one.kv_manager.n_reserved_slots for one in schedulers) / _n_slots(schedulers)


def _allocated_ratio(schedulers: Sequence[Scheduler]) -> float:
    return sum(one.kv_manager.n_allocated_slots for one in schedulers) / _n_slots(schedulers)


def _unused_ratio(schedulers: Sequence[Scheduler]) -> float:
    return sum(one.kv_manager.n_unused_slots for one in schedulers) / _n_slots(schedulers)


def _n_slots(schedulers: Sequence[Scheduler]) -> int:
    return sum(one.kv_manager.n_slots for one in schedulers)
