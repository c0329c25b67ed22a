"""The decisions of the tuner, from what it has tried: what to run next, and what to choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.tune.calibration import Calibration, MeasuredIteration
from services.tune.check import Check
from services.tune.layout import Layout
from services.tune.probe import Lone
from services.tune.search import EQUAL, Candidate, Prediction, Predictor, best_of
from services.tune.system import SystemFailed
from services.tune.workload import Workload
from simulator.outcome import LatencyLimits

WORTH_CHECKING = 0.85
"""A candidate that promises less than this part of the best is not run."""
DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS = 32, 512


@dataclass(frozen=True, slots=True)
class Tried:
    """A layout that was calibrated, and the best that can be had with it."""

    layout: Layout
    calibration: Calibration
    predictor: Predictor
    best: Prediction
    kv_bytes_per_slot: float
    """Of each rank."""
    iterations: tuple[MeasuredIteration, ...] = ()
    lone: tuple[Lone, ...] = ()
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a run of the tuner: the settings that it chose, and all that it tried."""

    chosen: Prediction
    tried: Sequence[Tried]
    checks: dict[Candidate, Check]
    kv_memory: int
    """Bytes for each rank."""
    default: Candidate
    """What `services.local` does by itself."""
    not_tried: Sequence[str]
    """Layouts that there was no time for, or that do not run, and why."""
    limits: LatencyLimits
    seconds: float

    @property
    def of_chosen(self) -> Tried:
        """The layout of what was chosen."""
        return next(each for each in self.tried if each.layout == self.chosen.candidate.layout)


def default_of(n_cpus: int) -> Candidate:
    """Returns the settings that `services.local` has by itself."""
    return Candidate(Layout(1, 1, n_cpus), DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS)


def to_check(
    tried: Sequence[Tried], checks: Mapping[Candidate, Check], default: Candidate
) -> Candidate | None:
    """Returns what to run next; None if nothing else may be the best.

    What promises most comes first, then the default, over which nothing is to be chosen unseen.
    """
    best = best_of([each.best for each in tried])
    ranked = sorted((each.best for each in tried), key=lambda each: -each.value)
    wanted = [
        *(default for each in tried if checks and each.layout == default.layout),
        best.candidate,
        *(each.candidate for each in ranked if each.value >= WORTH_CHECKING * best.value),
    ]
    return next((candidate for candidate in wanted if candidate not in checks), None)


def check_limits(tried: Sequence[Tried], workload: Workload) -> None:
    """Checks that limits can be kept at all, at however low a rate.

    Raises:
        SystemFailed: they cannot; says what can.
    """
    outcomes = [each.best.outcome for each in tried]
    if any(map(workload.is_kept_by, outcomes)):
        return
    ttft_s = min(outcome.p99_ttft_s for outcome in outcomes)
    tpot_s = min(outcome.p99_tpot_s for outcome in outcomes)
    raise SystemFailed(
        "no settings keep the limits, however few requests come: at best ttft_p99_s would be "
        f"{ttft_s:.3g}, tpot_p99_s {tpot_s:.3g}"
    )


def choose(tried: Sequence[Tried], checks: Mapping[Candidate, Check]) -> Prediction:
    """Returns the best of what was run, by what it reached.

    One run alone is compared with nothing. Then predictions decide, whose costs fit that run too,
    unless what was run promises nearly as much.

    Raises:
        SystemFailed: whatever was run has failed, and nothing else is left.
    """
    predictions = [
        each.predictor(candidate)
        for candidate, check in checks.items()
        for each in tried
        if each.layout == candidate.layout and not check.has_failed
    ]
    if len(predictions) > 1:
        highest = max(check.value for check in checks.values())
        least = (1 - EQUAL) * highest
        equal = [each for each in predictions if checks[each.candidate].value >= least]
        return min(equal, key=lambda each: each.latency_s)
    unseen = [each.best for each in tried if each.best.candidate not in checks]
    if not predictions and not unseen:
        raise SystemFailed("nothing that was run served requests")
    best = best_of([*predictions, *unseen])
    if predictions and predictions[0].value >= WORTH_CHECKING * best.value:
        return predictions[0]
    return best
