"""A model of costs from the records of iterations that were run.

What a stage computes is fitted to what it says that it took. Between two iterations of a full
pipeline there is a little more, the gap; and an iteration that finds an empty pipeline takes longer
by the ways of its plan, its activations and its result. Both are medians.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from services.tune.probe import Lone
from services.tune.system import Record
from simulator import fit
from simulator.costs import SLOPES, LinearCosts, Work, features

SLACK_S = 1e-4
"""An iteration that was sent that long before the last one returned has waited for it."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration that was run; times in seconds."""

    start_s: float
    """When its plan was sent."""
    end_s: float
    """When its result had come."""
    stages_s: tuple[float, ...]
    """What each stage took to compute and to hand on."""
    work: Work


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model of costs, and how well it fits."""

    costs: LinearCosts
    n_iterations: int
    error: float
    """Median of the relative errors of stages' times."""


def iterations_of(records: Sequence[Record]) -> list[Iteration]:
    """Returns the iterations of records, by their numbers."""
    ordered = sorted(records, key=lambda record: record.iteration)
    next_spans: dict[str, int] = {}  # the number of tokens of a request's next span
    works: list[Work] = []
    for record in reversed(ordered):
        spans = []
        for span in record.spans:
            # A prompt that is not cut is followed by a decode, or by nothing.
            is_sampled = next_spans.get(span.request_id, 1) == 1
            spans.append((span.start_position, span.n_tokens, is_sampled))
            next_spans[span.request_id] = span.n_tokens
        works.append(Work.of(spans))
    return [_iteration(*pair) for pair in zip(ordered, reversed(works), strict=True)]


def calibrate(iterations: Sequence[Iteration], lone: Sequence[Lone] = ()) -> Calibration:
    """Returns the model of costs that fits iterations best.

    Raises:
        ValueError: there are none.
    """
    rows = [features(each.work) for each in iterations]
    coefficients = []
    errors = []
    n_stages = len(iterations[0].stages_s) if iterations else 0
    for index in range(n_stages):
        times_s = [max(1e-6, each.stages_s[index]) for each in iterations]
        coefficients.append(fit.fit(rows, times_s, neighbours=list(pairwise(SLOPES))))
        errors.append(fit.median_error(coefficients[-1], rows, times_s))
    if not coefficients:
        raise ValueError("no iteration was run")
    gaps_s, ways_s = [], []
    for before, each in pairwise(iterations):
        if each.start_s < before.end_s - SLACK_S:
            gaps_s.append(each.end_s - before.end_s - max(each.stages_s))
        else:
            ways_s.append(each.end_s - each.start_s - sum(each.stages_s))
    gap_s = max(0.0, median(gaps_s)) if gaps_s else 0.0
    way_s = max(0.0, median(ways_s) - n_stages * gap_s) if ways_s else 0.0
    way_s /= n_stages + 1  # plan, hops, result
    costs = LinearCosts(tuple(coefficients), gap_s=gap_s, plan_s=way_s, hop_s=way_s, result_s=way_s)
    return Calibration(
        _with_request_s(costs, lone), n_iterations=len(iterations), error=max(errors)
    )


def _with_request_s(costs: LinearCosts, lone: Sequence[Lone]) -> LinearCosts:
    """Returns costs with what lone requests took that no iteration explains."""
    if not lone:
        return costs
    extra_s = [one.ttft_s - iteration_s(costs, Work.of([(0, one.n_prompt, True)])) for one in lone]
    return LinearCosts(
        costs.coefficients,
        gap_s=costs.gap_s,
        plan_s=costs.plan_s,
        hop_s=costs.hop_s,
        result_s=costs.result_s,
        request_s=max(0.0, median(extra_s)),
    )


def iteration_s(costs: LinearCosts, work: Work) -> float:
    """Returns the time of an iteration that finds an empty pipeline."""
    stages_s = sum(costs.stage_s(index, work) for index in range(costs.n_stages))
    return stages_s + costs.plan_s + (costs.n_stages - 1) * costs.hop_s + costs.result_s


def _iteration(record: Record, work: Work) -> Iteration:
    start_s = record.start_time.ToNanoseconds() / 1e9
    return Iteration(
        start_s=start_s,
        end_s=start_s + record.round_trip.ToNanoseconds() / 1e9,
        stages_s=tuple(
            (stage.compute.ToNanoseconds() + stage.send.ToNanoseconds()) / 1e9
            for stage in record.stages
        ),
        work=work,
    )
