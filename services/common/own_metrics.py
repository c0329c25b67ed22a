"""Counters and histograms for prometheus_client that only one thread changes.

The library's own metrics take a lock and make several calls for each change, because any thread may
change them. The metrics of this module are plain numbers, which the thread that answers Prometheus
reads without a lock. Registries, families and formats come from the library. Unlike the library,
this module refuses neither negative amounts nor long exemplars.
"""

import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import INF, floatToGoString


class Count:
    """The value of a counter, which only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Adds `amount` to the value."""
        self.value += amount


class Distribution:
    """The value of a histogram: the number of observations in each bucket, and the sum of all
    observations."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the buckets, in ascending order. The last bound is
        infinite."""
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._exemplars: dict[int, Exemplar] = {}
        self._sum = 0.0

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Counts `amount` in its bucket. If there is an `exemplar`, it becomes the exemplar of the
        bucket."""
        bucket = bisect_left(self._bounds, amount)
        self._counts[bucket] += 1
        self._sum += amount
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(dict(exemplar), amount, time.time())

    @property
    def sum(self) -> float:
        """Sum of all observed numbers."""
        return self._sum

    @property
    def buckets(self) -> Sequence[tuple[str, float, Exemplar | None]]:
        """Returns, for each bucket, its upper bound, the number of observations up to this bound,
        and its exemplar."""
        n_below = accumulate(self._counts)
        return [
            (floatToGoString(bound), n, self._exemplars.get(bucket))
            for bucket, (bound, n) in enumerate(zip(self._bounds, n_below, strict=True))
        ]


Child = TypeVar("Child", Count, Distribution)


class _Metric(Collector, Generic[Child]):
    """A metric with one name. It has a child (a value of its own) for each set of label values in
    use."""

    _only: Child
    """The only child of a metric without labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._documentation, self._labelnames = name, documentation, labelnames
        self._children: dict[tuple[str, ...], Child] = {}
        if not labelnames:
            self._only = self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Child:
        """Returns the child for the given label values. The child is exported from now on."""
        if len(values) != len(self._labelnames):
            raise ValueError(f"{self._name} has {len(self._labelnames)} labels")
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._new_child()
        return child

    def describe(self) -> Iterator[Metric]:
        """Yields the metric family without samples. The registry calls this method to learn the
        metric's name."""
        yield self._family({})

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family with samples. Called in the thread that answers Prometheus."""
        yield self._family(self._children.copy())

    @abstractmethod
    def _new_child(self) -> Child: ...

    @abstractmethod
    def _family(self, children: Mapping[tuple[str, ...], Child]) -> Metric: ...


class Counter(_Metric[Count]):
    """A counter metric. It has one number, or one for each set of label values."""

    def inc(self, amount: float = 1) -> None:
        """Adds `amount` to a counter without labels."""
        self._only.inc(amount)

    def _new_child(self) -> Count:
        return Count()

    def _family(self, children: Mapping[tuple[str, ...], Count]) -> Metric:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, count in children.items():
            family.add_metric(values, count.value)
        return family


class Histogram(_Metric[Distribution]):
    """A histogram metric. It has one distribution, or one for each set of label values."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """`buckets` are the upper bounds of the buckets, in ascending order. A further bucket for
        all larger numbers is added."""
        self._bounds = (*buckets, INF)
        super().__init__(name, documentation, labelnames, registry=registry)

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Counts `amount` in a histogram without labels."""
        self._only.observe(amount, exemplar)

    def _new_child(self) -> Distribution:
        return Distribution(self._bounds)

    def _family(self, children: Mapping[tuple[str, ...], Distribution]) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, distribution in children.items():
            family.add_metric(values, distribution.buckets, distribution.sum)  # type: ignore[arg-type]
        return family
