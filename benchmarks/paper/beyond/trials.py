"""Trials: a setup on a machine under a load, in separate processes.

The highest throughput is measured with requests that all arrive at once. The throughput within a
latency limit is found by bisection over the rate of arrivals: it is the throughput at the highest
tried rate at which the median normalised latency stays within the limit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.paper.beyond.loads import Load
from benchmarks.paper.beyond.setups import Setup
from benchmarks.paper.gpu_costs import Gpu, GpuCosts
from benchmarks.paper.models import MODELS, PaperModel
from benchmarks.paper.published import HEADLINE_MS_PER_TOKEN
from benchmarks.paper.sweep import middle_throughput
from simulator.costs import Costs, IterationWork
from simulator.engine import Arrival, Simulation
from simulator.outcome import Outcome
from simulator.virtual_clock import VirtualClock

N_HALVINGS = 6
HIGHEST_PART = 1.1
"""Upper end of the bisection for the arrival rate, as a multiple of the highest throughput. With
few requests, the median latency may stay within the limit at a rate slightly above the sustainable
one."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class InBand:
    """Costs of an engine in which each stage waits for a control message before it gets its
    data."""

    costs: Costs
    message_s: tuple[float, float]
    """Seconds for a control message to the first stage, and for one to each further stage."""

    @property
    def n_stages(self) -> int:
        return self.costs.n_stages

    @property
    def plan_s(self) -> float:
        return self.costs.plan_s

    @property
    def hop_s(self) -> float:
        return self.costs.hop_s

    @property
    def result_s(self) -> float:
        return self.costs.result_s

    @property
    def request_s(self) -> float:
        return self.costs.request_s

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the seconds for which an iteration occupies a stage, including the control
        message."""
        return self.message_s[stage_index > 0] + self.costs.stage_s(stage_index, work)


@dataclass(frozen=True, slots=True)
class Trial:
    """A setup on a machine under a load."""

    setup: Setup
    gpu: Gpu
    load: Load
    model: PaperModel = MODELS["175B"]
    message_s: tuple[float, float] = (0.0, 0.0)
    """Seconds for a control message to the first stage, and for one to each further stage."""

    def outcome(self, rate: float | None) -> Outcome:
        """Simulates the load at `rate` requests per second and returns the outcome. If `rate` is
        None, all requests arrive at once."""
        return self.serve(self.load.arrivals(rate))

    def serve(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Simulates the requests `arrivals` and returns the outcome."""
        clock = VirtualClock()
        costs = InBand(GpuCosts(self.model, self.gpu), self.message_s)
        scheduler = self.setup.build(self.model, clock)
        return Simulation(scheduler, costs, arrivals, clock=clock).run()

    def highest(self) -> float:
        """Returns the throughput in requests per second if all requests arrive at once."""
        return middle_throughput(self.outcome(None).requests)

    def within(self, limit_s: float = HEADLINE_MS_PER_TOKEN / 1e3) -> float:
        """Returns the throughput, in requests per second, at the highest tried rate at which the
        median normalised latency is at most `limit_s`. The result is at most the highest
        throughput, and 0 if no tried rate keeps the limit."""
        highest = self.highest()
        kept, missed, found = 0.0, HIGHEST_PART * highest, 0.0
        for _ in range(N_HALVINGS):
            rate = (kept + missed) / 2
            outcome = self.outcome(rate)
            if outcome.median_normalised_s > limit_s:
                missed = rate
            else:
                kept, found = rate, middle_throughput(outcome.requests)
        return min(found, highest)


def highest(trial: Trial) -> float:
    """Returns the highest throughput of a trial in requests per second; for `on_all_cores`."""
    return trial.highest()


def within(trial: Trial) -> float:
    """Returns the throughput of a trial, in requests per second, within the latency in the paper's
    abstract; for `on_all_cores`."""
    return trial.within()


def on_all_cores(do: Callable[..., Result], *arguments: Sequence[Any]) -> list[Result]:
    """Calls `do`, a function of a module, in several processes: once for each position of the
    sequences `arguments`, as `map` does. Returns the results in order."""
    with ProcessPoolExecutor() as executor:
        return list(executor.map(do, *arguments))
