"""The metrics of a stage.

Metrics are collected from the controller when Prometheus requests them, so they add no time to an
iteration. The times of iterations are among the scheduler's metrics.
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common import semconv
from services.worker.controller.controller import Controller


class WorkerMetrics(Collector):
    """All metrics of one stage."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Yields every metric. This method is called from the thread that answers Prometheus."""
        controller = self._controller
        loading, rank_watch = controller.loading, controller.rank_watch
        yield GaugeMetricFamily(
            semconv.WEIGHTS_LOADED, "Bytes of weights in memory.", loading.n_bytes_loaded
        )
        yield GaugeMetricFamily(
            semconv.WEIGHTS, "Bytes of weights that this stage loads.", loading.n_bytes
        )
        yield GaugeMetricFamily(semconv.RANKS, "Ranks of this stage.", rank_watch.tp_size)
        yield GaugeMetricFamily(
            semconv.RANKS_ALIVE, "Ranks that give signs of life.", rank_watch.n_alive
        )
        yield GaugeMetricFamily(
            semconv.WORKER_EPOCH, "Epoch that this stage joined last.", controller.epoch.number
        )
        yield CounterMetricFamily(
            semconv.HEARTBEATS, "Signs of life of the whole stage.", rank_watch.n_heartbeats
        )
        yield CounterMetricFamily(
            semconv.PLANS, "Plans of iterations handed on.", controller.plans.n_plans
        )
