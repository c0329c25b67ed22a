"""Counters and histograms for prometheus_client that only one thread changes.

The library's own metrics take a lock, and make several calls, for each change, since other threads
might change them too. The metrics of this module have plain numbers, which the thread that answers
Prometheus reads without a lock. Registries, families and formats are the library's. Unlike the
library, this module refuses neither negative amounts nor long exemplars.
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
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Adds an amount to the number."""
        self.value += amount


class Distribution:
    """The distribution of observed numbers: a count for each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the largest numbers of the buckets, in order. The last bound is infinite."""
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._exemplars: dict[int, Exemplar] = {}
        self._sum = 0.0

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Counts a number in its bucket, whose exemplar becomes `exemplar` if there is one."""
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
        """Returns, for each bucket, its upper bound, the count of numbers up to this bound, and its
        exemplar."""
        n_below = accumulate(self._counts)
        return [
            (floatToGoString(bound), n, self._exemplars.get(bucket))
            for bucket, (bound, n) in enumerate(zip(self._bounds, n_below, strict=True))
        ]


Child = TypeVar("Child", Count, Distribution)


class _Metric(Collector, Generic[Child]):
    """A metric of one name, with a child for each set of label values in use."""

    _only: Child
    """The child of a metric without labels."""

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
        """Returns the child for some label values, which is exported from now on."""
        if len(values) != len(self._labelnames):
            raise ValueError(f"{self._name} has {len(self._labelnames)} labels")
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._new_child()
        return child

    def describe(self) -> Iterator[Metric]:
        """Yields the family without samples, from which the registry learns the name."""
        yield self._family({})

    def collect(self) -> Iterator[Metric]:
        """Yields the family with samples. This method is called in the thread that answers
        Prometheus."""
        yield self._family(self._children.copy())

    @abstractmethod
    def _new_child(self) -> Child: ...

    @abstractmethod
    def _family(self, children: Mapping[tuple[str, ...], Child]) -> Metric: ...


class Counter(_Metric[Count]):
    """A number that grows, or one for each set of labels."""

    def inc(self, amount: float = 1) -> None:
        """Adds an amount to a counter without labels."""
        self._only.inc(amount)

    def _new_child(self) -> Count:
        return Count()

    def _family(self, children: Mapping[tuple[str, ...], Count]) -> Metric:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, count in children.items():
            family.add_metric(values, count.value)
        return family


class Histogram(_Metric[Distribution]):
    """A distribution of numbers, or one for each set of labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """`buckets` are the largest numbers of the buckets. One more bucket takes all larger
        numbers."""
        self._bounds = (*buckets, INF)
        super().__init__(name, documentation, labelnames, registry=registry)

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Counts a number in a histogram without labels."""
        self._only.observe(amount, exemplar)

    def _new_child(self) -> Distribution:
        return Distribution(self._bounds)

    def _family(self, children: Mapping[tuple[str, ...], Distribution]) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, distribution in children.items():
            family.add_metric(values, distribution.buckets, distribution.sum)  # type: ignore[arg-type]
        return family
