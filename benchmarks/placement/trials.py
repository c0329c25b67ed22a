"""Trials: one load on one kind of site, with a number of pipelines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.placement import loads
from benchmarks.placement.figures import Figures
from benchmarks.placement.fleet import Fleet
from benchmarks.placement.hardware import COSTS
from benchmarks.placement.loads import Load
from benchmarks.placement.routers import ApproximatePrefix, LeastRequests, RoundRobin, Router
from simulator.engine import Simulation
from simulator.fairness import Window
from simulator.virtual_clock import VirtualClock

WARM_PART = 0.25
"""Share of the period of arrivals that is left out of the results as a warm-up."""

NewRouter = Callable[[int], Router]
"""A function that makes a router. Its argument is the number of tokens in a K/V block."""

ROUTERS: Mapping[str, NewRouter] = {
    "round robin": lambda _: RoundRobin(),
    "least requests": lambda _: LeastRequests(),
    "approximate prefix": ApproximatePrefix,
}
ONE_POOL = "one pool"
HALVES = "two pools"
"""Name of a site with two schedulers, which have half of the pipelines each and get requests in
turn."""

SITES = (ONE_POOL, *ROUTERS)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of arrival in requests per second and pipeline."""

    steady: float
    """Rate without overload: about four fifths of the highest rate that a pipeline can serve."""
    overload: float
    """Rate in overload: about one and a half times the highest rate that a pipeline can serve."""


RATES = {
    "mooncake": Rates(0.45, 1.2),
    "chats": Rates(2.5, 7.0),
    "azure": Rates(4.0, 9.0),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation to run: a load at a rate on a site."""

    load: str
    site: str
    n_pipelines: int
    n_requests: int
    is_overload: bool
    seed: int = 0
    mooncake: Path | None = None
    """Path of the publisher's file of Mooncake's trace. Only the load `mooncake` needs the file."""

    def run(self) -> Figures:
        """Runs the trial until all requests have ended, and returns the results.

        Raises:
            ValueError: the publisher's file is missing, malformed or too short.
        """
        load, clock = self.requests(), VirtualClock()
        fleet = self.fleet(load.block_size, clock)
        outcome = Simulation(fleet, COSTS, load.arrivals, clock=clock).run()
        end_s = load.arrivals[-1].time_s
        return Figures.of(outcome, fleet.hit_rate, Window(WARM_PART * end_s, end_s))

    @property
    def rate(self) -> float:
        """Rate of arrivals in requests per second, over all pipelines."""
        rates = RATES[self.load]
        return self.n_pipelines * (rates.overload if self.is_overload else rates.steady)

    def requests(self) -> Load:
        """Returns the requests with their arrival times."""
        if self.load == "chats":
            return loads.chats(self.n_requests, rate=self.rate, seed=self.seed)
        if self.load == "azure":
            return loads.azure(self.n_requests, seed=self.seed).at_rate(self.rate)
        if self.mooncake is None:
            raise ValueError("the load `mooncake` needs the publisher's file")
        return loads.mooncake(self.mooncake, self.n_requests, seed=self.seed).at_rate(self.rate)

    def fleet(self, block_size: int, clock: VirtualClock) -> Fleet:
        """Returns a new site without requests."""
        new = partial(Fleet, clock=clock, block_size=block_size)
        if self.site == ONE_POOL:
            return new(1, self.n_pipelines, RoundRobin())
        if self.site == HALVES:
            return new(2, self.n_pipelines // 2, RoundRobin())
        return new(self.n_pipelines, 1, ROUTERS[self.site](block_size))


def run(trial: Trial) -> Figures:
    """Runs a trial and returns its results; a function of the module, so that other processes can
    call it."""
    return trial.run()
