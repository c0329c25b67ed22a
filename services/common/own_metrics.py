"""Counters and histograms that one thread keeps, to be used as prometheus_client's.

The library's take a lock for each number that they change, and several calls to get there: it
cannot know that only the event loop counts. Here a number is a number, and the thread that answers
Prometheus reads it as it is. All else is the library's: registries, families, formats. That amounts
are not negative, and exemplars short, is not checked.
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
        """Adds to it."""
        self.value += amount


class Distribution:
    """Numbers that were observed: how many fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the largest number of each bucket, the last of which is infinite."""
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._exemplars: dict[int, Exemplar] = {}
        self._sum = 0.0

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Takes a number in. If there is an exemplar, its bucket points to that from now on."""
        bucket = bisect_left(self._bounds, amount)
        self._counts[bucket] += 1
        self._sum += amount
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(dict(exemplar), amount, time.time())

    @property
    def sum(self) -> float:
        """The sum of all numbers."""
        return self._sum

    @property
    def buckets(self) -> Sequence[tuple[str, float, Exemplar | None]]:
        """For each bucket its bound, how many numbers are no larger, and its exemplar."""
        n_below = accumulate(self._counts)
        return [
            (floatToGoString(bound), n, self._exemplars.get(bucket))
            for bucket, (bound, n) in enumerate(zip(self._bounds, n_below, strict=True))
        ]


Child = TypeVar("Child", Count, Distribution)


class _Metric(Collector, Generic[Child]):
    """A metric of one name, with a child for each set of label values that was asked for."""

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
        """Returns the child of these label values, which is shown from now on."""
        if len(values) != len(self._labelnames):
            raise ValueError(f"{self._name} has {len(self._labelnames)} labels")
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._new_child()
        return child

    def describe(self) -> Iterator[Metric]:
        """Yields the family without its numbers: the registry allows each name once."""
        yield self._family({})

    def collect(self) -> Iterator[Metric]:
        """Yields the family; called from the thread that answers Prometheus."""
        yield self._family(self._children.copy())

    @abstractmethod
    def _new_child(self) -> Child: ...

    @abstractmethod
    def _family(self, children: Mapping[tuple[str, ...], Child]) -> Metric: ...


class Counter(_Metric[Count]):
    """A number that grows, or one for each set of labels."""

    def inc(self, amount: float = 1) -> None:
        """Adds to the number of a counter without labels."""
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
        """`buckets` are the largest numbers of buckets; there is another one for the rest."""
        self._bounds = (*buckets, INF)
        super().__init__(name, documentation, labelnames, registry=registry)

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Takes a number into a histogram without labels."""
        self._only.observe(amount, exemplar)

    def _new_child(self) -> Distribution:
        return Distribution(self._bounds)

    def _family(self, children: Mapping[tuple[str, ...], Distribution]) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, distribution in children.items():
            family.add_metric(values, distribution.buckets, distribution.sum)  # type: ignore[arg-type]
        return family
