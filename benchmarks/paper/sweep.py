"""Runs systems at many rates, on all cores.

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
    """A run of a system at one rate, in requests per second."""

    model: str
    system: str
    rate: float
    lengths: tuple[Lengths, ...]
    seed: int = 0
    n_in_flight: int | None = None
    """Number of batches in flight for Orca; None means one for each stage."""


def run(one: Run, engines: dict[str, Gpu]) -> Point:
    """Returns the throughput in requests per second and the median normalised latency in ms."""
    model = MODELS[one.model]
    times_s = poisson_arrivals(len(one.lengths), rate=one.rate, seed=one.seed)
    outcome = Simulation(
        scheduling(one.system, model, n_in_flight=one.n_in_flight),
        costs_of(one.system, model, engines),
        arrivals_of(one.lengths, times_s),
    ).run()
    return middle_throughput(outcome.requests), 1e3 * outcome.median_normalised_s


def middle_throughput(requests: Sequence[RequestTimes]) -> float:
    """Returns the requests per second in the middle half of the requests, ordered by their ends."""
    ends_s = sorted(request.end_s for request in requests)
    first, last = len(ends_s) // 4, 3 * len(ends_s) // 4
    return (last - first) / (ends_s[last] - ends_s[first])


def run_all(runs: Sequence[Run], engines: dict[str, Gpu]) -> list[Point]:
    """Returns the points of runs, in their order."""
    with ProcessPoolExecutor() as executor:
        return list(executor.map(run, runs, [engines] * len(runs)))


def throughput_at(points: Iterable[Point], latency_ms: float) -> float | None:
    """Returns the throughput at a latency by interpolation; None if the system never reaches the
    latency. `points` are a curve from the lowest rate to the highest."""
    curve = list(points)
    if curve[0][1] > latency_ms:
        return None
    for (x, y), (next_x, next_y) in pairwise(curve):
        if next_y > latency_ms:
            part = (latency_ms - y) / (next_y - y)
            return x + part * (next_x - x)
    return curve[-1][0]


def latency_at(points: Iterable[Point], throughput: float) -> float | None:
    """Returns the latency in ms at a throughput by interpolation; None above the highest
    throughput."""
    curve = list(points)
    if throughput <= curve[0][0]:
        return curve[0][1]
    for (x, y), (next_x, next_y) in pairwise(curve):
        if x <= throughput <= next_x:
            return y if next_x == x else y + (throughput - x) / (next_x - x) * (next_y - y)
    return None
