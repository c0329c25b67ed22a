"""Runs systems at many arrival rates, on all cores.

The traces of different rates have equal requests, with the arrival times scaled. The throughput is
measured over the middle half of the requests in the order of their ends, so that the beginning and
the end of a run do not count.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.paper.gpu_costs import Gpu
from benchmarks.paper.models import MODELS
from benchmarks.paper.published import Point
from benchmarks.paper.systems import costs_of, scheduling
from simulator.engine import Simulation, arrivals_of
from simulator.outcome import RequestTimes
from simulator.workload import Lengths, poisson_arrivals


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a system at one arrival rate, in requests per second."""

    model: str
    system: str
    rate: float
    lengths: tuple[Lengths, ...]
    seed: int = 0
    n_in_flight: int | None = None
    """Number of batches in flight for Orca; None means one for each stage."""


def run(one: Run, engines: dict[str, Gpu]) -> Point:
    """Simulates a run. Returns the throughput in requests per second and the median normalised
    latency in ms per token."""
    model = MODELS[one.model]
    times_s = poisson_arrivals(len(one.lengths), rate=one.rate, seed=one.seed)
    outcome = Simulation(
        scheduling(one.system, model, n_in_flight=one.n_in_flight),
        costs_of(one.system, model, engines),
        arrivals_of(one.lengths, times_s),
    ).run()
    return middle_throughput(outcome.requests), 1e3 * outcome.median_normalised_s


def middle_throughput(requests: Sequence[RequestTimes]) -> float:
    """Returns the throughput in requests per second over the middle half of the requests, in the
    order in which they end."""
    ends_s = sorted(request.end_s for request in requests)
    first, last = len(ends_s) // 4, 3 * len(ends_s) // 4
    return (last - first) / (ends_s[last] - ends_s[first])


def run_all(runs: Sequence[Run], engines: dict[str, Gpu]) -> list[Point]:
    """Simulates all runs in several processes, and returns the point of each in order."""
    with ProcessPoolExecutor() as executor:
        return list(executor.map(run, runs, [engines] * len(runs)))


def throughput_at(points: Iterable[Point], latency_ms: float) -> float | None:
    """Returns the throughput in requests per second at which the latency exceeds `latency_ms`, by
    interpolation. `points` are a curve from the lowest rate to the highest. Returns None if the
    first point is above the latency, and the last point's throughput if no point is above it."""
    curve = list(points)
    if curve[0][1] > latency_ms:
        return None
    for (x, y), (next_x, next_y) in pairwise(curve):
        if next_y > latency_ms:
            part = (latency_ms - y) / (next_y - y)
            return x + part * (next_x - x)
    return curve[-1][0]


def latency_at(points: Iterable[Point], throughput: float) -> float | None:
    """Returns the latency in ms per token at a throughput, by interpolation. Returns the latency of
    the first point below its throughput, and None above the highest throughput."""
    curve = list(points)
    if throughput <= curve[0][0]:
        return curve[0][1]
    for (x, y), (next_x, next_y) in pairwise(curve):
        if x <= throughput <= next_x:
            return y if next_x == x else y + (throughput - x) / (next_x - x) * (next_y - y)
    return None
