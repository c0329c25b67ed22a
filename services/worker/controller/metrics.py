"""What a stage counts: read from its controller and its ranks when Prometheus asks, so that it
costs an iteration nothing. What iterations cost the stage, the scheduler knows.
"""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common import semconv
from services.worker.controller.controller import Controller


class Loading(Protocol):
    """How far the weights of all ranks have come."""

    n_bytes_loaded: int
    n_bytes: int


class WorkerMetrics(Collector):
    """All metrics of one stage."""

    def __init__(self, controller: Controller, loading: Loading) -> None:
        self._controller = controller
        self._loading = loading

    def collect(self) -> Iterator[Metric]:
        """Called from the thread that answers Prometheus."""
        controller, loading = self._controller, self._loading
        yield GaugeMetricFamily(
            semconv.WEIGHTS_LOADED, "Bytes of weights in memory.", loading.n_bytes_loaded
        )
        yield GaugeMetricFamily(
            semconv.WEIGHTS, "Bytes of weights that this stage loads.", loading.n_bytes
        )
        yield GaugeMetricFamily(semconv.RANKS, "Ranks of this stage.", controller.tp_size)
        yield GaugeMetricFamily(
            semconv.RANKS_ALIVE, "Ranks that give signs of life.", controller.n_ranks_alive
        )
        yield GaugeMetricFamily(
            semconv.WORKER_EPOCH, "Epoch that this stage joined last.", controller.epoch
        )
        yield CounterMetricFamily(
            semconv.HEARTBEATS, "Signs of life of the whole stage.", controller.n_heartbeats
        )
        yield CounterMetricFamily(
            semconv.PLANS, "Plans of iterations handed on.", controller.n_plans
        )
