"""The decisions of the tuner: which candidate to run next, and which candidate to choose."""

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
"""A candidate is run only if its predicted value is at least this fraction of the best predicted
value."""
DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS = 32, 512


@dataclass(frozen=True, slots=True)
class Tried:
    """A calibrated layout, with the prediction for its best settings."""

    layout: Layout
    calibration: Calibration
    predictor: Predictor
    best: Prediction
    kv_bytes_per_slot: float
    """Number of bytes of keys and values in each rank for one K/V slot."""
    iterations: tuple[MeasuredIteration, ...] = ()
    lone: tuple[Lone, ...] = ()
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a run of the tuner: the chosen settings, and all layouts and candidates that
    were tried."""

    chosen: Prediction
    tried: Sequence[Tried]
    checks: dict[Candidate, Check]
    kv_memory: int
    """Number of bytes of K/V memory for each rank."""
    default: Candidate
    """The default settings of `services.local`."""
    not_tried: Sequence[str]
    """For each layout that was not calibrated, a sentence with the reason, for example that it does
    not run or that there was no time."""
    limits: LatencyLimits
    seconds: float

    @property
    def of_chosen(self) -> Tried:
        """The calibrated layout of the chosen settings."""
        return next(each for each in self.tried if each.layout == self.chosen.candidate.layout)


def default_of(n_cpus: int) -> Candidate:
    """Returns the default settings of `services.local` on a machine with `n_cpus` CPUs."""
    return Candidate(Layout(1, 1, n_cpus), DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS)


def to_check(
    tried: Sequence[Tried], checks: Mapping[Candidate, Check], default: Candidate
) -> Candidate | None:
    """Returns the candidate to run next on a real system. Returns None if all candidates that are
    worth a run have been run.

    The candidate with the best prediction is run first. The default settings are second, so that
    the chosen settings can be compared with them.
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
    """Checks that some settings are predicted to keep the latency limits, at least at the lowest
    rate.

    Raises:
        SystemFailed: no settings keep the limits. The error names the lowest predicted latencies.
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
    """Returns the prediction for the settings to choose. A candidate whose run failed is never
    chosen.

    If at least two candidates served, the one with the best measured value is chosen. If only one
    served, there is nothing to compare its measurement with. It is then chosen if its prediction is
    nearly as good as the best prediction. Otherwise the candidate with the best prediction is
    chosen.

    Raises:
        SystemFailed: all candidates that were run have failed, and no other candidate is left.
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
