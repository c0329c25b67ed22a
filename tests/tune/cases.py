"""Costs, workloads and results for tests of the tuner."""

from services.tune.calibration import Calibration
from services.tune.check import Check
from services.tune.choice import Tried, Tuned
from services.tune.layout import Layout
from services.tune.search import Candidate, Memory, Predictor, search
from services.tune.workload import Workload
from simulator.costs import LinearCosts
from simulator.outcome import LatencyLimits
from simulator.workload import mixed_lengths

WHOLE, CUT = Layout(1, 1, 2), Layout(2, 1, 1)
STAGE = (5e-3, *(1e-3,) * 6, 1e-4, 1e-7, 1e-8)
"""A stage that reads its weights in 5 ms, and takes 1 ms more for each token."""


def workload(
    limits: LatencyLimits | None = None, *, n: int = 24, rate: float | None = None
) -> Workload:
    """Returns a workload of short requests."""
    lengths = mixed_lengths(n, seed=0, prompts=(8, 64), outputs=(1, 24))
    return Workload(lengths, rate, limits or LatencyLimits(), seed=0)


def costs(n_stages: int = 1, *, way_s: float = 0.001) -> LinearCosts:
    """Returns the costs of a model that is divided into `n_stages` stages. `way_s` is the travel
    time between them in seconds."""
    share = tuple(value / n_stages for value in STAGE)
    return LinearCosts((share,) * n_stages, plan_s=way_s, hop_s=way_s, result_s=way_s)


def tried(layout: Layout, *, way_s: float = 0.001) -> Tried:
    """Returns a layout with a made-up calibration and the best settings for it."""
    of_layout = costs(layout.stages, way_s=way_s)
    predictor = Predictor(of_layout, workload(), Memory(10_000))
    return Tried(
        layout,
        Calibration(of_layout, n_iterations=100, error=0.01),
        predictor,
        search(layout, predictor, n_requests=24),
        kv_bytes_per_slot=10_000.0,
    )


def tuned() -> Tuned:
    """Returns the result of a tuning run with two layouts, both of which were run. The layout with
    a single rank was chosen."""
    whole, cut = tried(WHOLE), tried(CUT, way_s=0.02)
    return Tuned(
        chosen=whole.best,
        tried=[whole, cut],
        checks={
            whole.best.candidate: Check(0.9 * whole.best.value, True, ()),
            cut.best.candidate: Check(0.8 * cut.best.value, False, ()),
        },
        kv_memory=2**26,
        default=candidate(32, 512),
        not_tried=["4 stages: there was no time to try it"],
        limits=LatencyLimits(),
        seconds=100.0,
    )


def candidate(size: int, tokens: int, layout: Layout = WHOLE) -> Candidate:
    """Returns a candidate: settings with a layout."""
    return Candidate(layout, size, tokens)
