"""All metrics of a scheduler process: requests, the pipelines, iterations, leadership."""

import time
from collections.abc import Callable, Collection
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from services.common import semconv
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.iteration_metrics import EpochObserver, IterationMetrics
from services.scheduler.observing.pipeline_metrics import PipelineMetrics
from services.scheduler.observing.request_metrics import RequestMetrics
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.pipeline.shortfall import UnfitWorker

MODEL_STATES = ("serving", "asleep", "starting", "unavailable")
"""All states of a model. `SchedulerService.state` explains them."""


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
        self._unfit = Gauge(
            semconv.UNFIT_WORKER,
            "1 for each worker that stays out of the pipelines, since it does not fit.",
            ["worker", "says"],
            registry=registry,
        )
        self._state = Gauge(
            semconv.MODEL_STATE,
            "1 for the state of the model, if this scheduler leads.",
            ["state"],
            registry=registry,
        )
        self._serving = Gauge(
            semconv.SERVING, "1 while requests that come now get tokens.", registry=registry
        )

    def set_leading(self, is_leading: bool) -> None:
        """Sets the metric that says whether this scheduler leads. If it does not lead, also sets
        the number of wanted pipelines to 0."""
        self._leader.set(is_leading)
        if not is_leading:
            self.note_wanted(0)

    def note_unfit(self, unfit: Collection[UnfitWorker]) -> None:
        """Sets the gauge that names unfit workers to 1 for each worker in `unfit`, and removes all
        other workers from it."""
        self._unfit.clear()
        for worker in unfit:
            self._unfit.labels(worker.name or worker.address, worker.says).set(1)

    def note_wanted(self, n_pipelines: int) -> None:
        """Sets the metric of the number of wanted pipelines: the number that the autoscaler has
        computed or, without an autoscaler, the number that the known workers and the settings
        allow."""
        self._pipeline.wanted.set(n_pipelines)

    def ask_queued(self, n_tokens: Callable[[], float]) -> None:
        """Sets the function that returns the value of the gauge `orcinus_tokens_queued`."""
        self._pipeline.queued.set_function(n_tokens)

    def ask_state(self, state: Callable[[], str]) -> None:
        """Sets the function from which the gauges `orcinus_model_state` are read. The function
        returns the state of the model."""
        for name in MODEL_STATES:
            self._state.labels(name).set_function(partial(_is_state, state, name))

    def ask_serving(self, reason_against: Callable[[], str]) -> None:
        """Sets the function from which the gauge `orcinus_serving` is read. The function returns
        why this scheduler does not serve, or an empty text if it serves."""
        self._serving.set_function(lambda: not reason_against())

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> EpochObserver:
        """Returns the observer of an epoch that is about to form. Also counts the loads of adapters
        in this epoch."""
        scheduler.pool.adapters.on_load_end = self._note_load_end
        return EpochObserver(pipeline, scheduler, self._pipeline, self._iterations, self._clock_ns)

    def _note_load_end(self, end: str) -> None:
        self._pipeline.adapter_loads[end].inc()


def _is_state(state: Callable[[], str], name: str) -> bool:
    return state() == name
