"""Makes a model of costs from the records of iterations that were run.

The compute time of each stage is fitted to the durations that the stage has reported. Two further
times are not reported: the gap between two iterations on a stage, and the travel time of a plan,
activations or a result. Both are chosen such that the model best predicts when each result arrives,
given the time at which its plan was sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from services.tune.probe import Lone
from services.tune.system import Record
from simulator import fit
from simulator.costs import SLOPES, IterationWork, LinearCosts, dot, features

N_STEPS = 24
"""Number of steps of a golden-section search. Each step reduces the range to 0.62 of its size."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """An iteration that was run on a real system. Times are in seconds."""

    start_s: float
    """Time at which the iteration's plan was sent."""
    end_s: float
    """Time at which the iteration's result had arrived."""
    stages_s: tuple[float, ...]
    """For each stage, the seconds that it took to compute and to send its result."""
    work: IterationWork
    pipeline: int = 0
    """Number of the pipeline that ran the iteration."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model of costs, the number of iterations to which the model was fitted, and the error of
    the fit."""

    costs: LinearCosts
    n_iterations: int
    error: float
    """Error of the fit for the stage with the largest error. The error of a stage is the median
    relative error of its predicted times."""


def iterations_of(records: Sequence[Record]) -> list[MeasuredIteration]:
    """Returns the iterations in `records`, sorted by pipeline number and then by iteration number.
    Every request must have run on one pipeline only."""
    ordered = sorted(records, key=lambda record: (record.pipeline, record.iteration))
    next_spans: dict[int, int] = {}  # the number of tokens of a request's next span
    works: list[IterationWork] = []
    for record in reversed(ordered):
        spans = []
        columns = (record.numbers, record.start_positions, record.n_tokens)
        for number, start_position, n_tokens in zip(*columns, strict=True):
            # A span that ends the prompt is sampled: a decode of one token follows, or nothing.
            is_sampled = next_spans.get(number, 1) == 1
            spans.append((start_position, n_tokens, is_sampled))
            next_spans[number] = n_tokens
        works.append(IterationWork.of(spans))
    return [_iteration(*pair) for pair in zip(ordered, reversed(works), strict=True)]


def calibrate(iterations: Sequence[MeasuredIteration], lone: Sequence[Lone] = ()) -> Calibration:
    """Returns the model of costs that fits the iterations best. `lone` are requests that ran alone.
    Their times show how much time a request spends outside of iterations.

    Raises:
        ValueError: there are no iterations.
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
    gap_s, way_s = explain_ends(iterations)
    costs = LinearCosts(tuple(coefficients), gap_s=gap_s, plan_s=way_s, hop_s=way_s, result_s=way_s)
    return Calibration(
        _with_request_s(costs, lone), n_iterations=len(iterations), error=max(errors)
    )


def costs_of_run(iterations: Sequence[MeasuredIteration]) -> LinearCosts:
    """Returns the costs that predict exactly the total time of these iterations, on each stage.

    `calibrate` gives little weight to iterations that took much longer than others of their kind,
    because they say little about other runs. But these costs must reproduce this run, slow
    iterations included. So the fitted coefficients of a stage are multiplied by the sum of its
    measured times, divided by the sum of its predicted times.

    Raises:
        ValueError: there are no iterations.
    """
    costs = calibrate(iterations).costs
    rows = [features(each.work) for each in iterations]
    scaled = []
    for index, coefficients in enumerate(costs.coefficients):
        measured_s = sum(each.stages_s[index] for each in iterations)
        predicted_s = sum(dot(coefficients, row) for row in rows)
        factor = measured_s / predicted_s if predicted_s else 1.0
        scaled.append(tuple(factor * value for value in coefficients))
    return replace(costs, coefficients=tuple(scaled))


def explain_ends(iterations: Sequence[MeasuredIteration]) -> tuple[float, float]:
    """Returns the gap after each iteration on a stage, and the travel time of a plan, activations
    or a result. Both are in seconds. They are chosen such that they predict best when iterations
    end: they minimise the sum of the absolute errors of the predicted ends."""
    longest_s = max(median(each.end_s - each.start_s for each in iterations), 1e-6)

    def best_way(gap_s: float) -> tuple[float, float]:
        return _least(lambda way_s: _error(iterations, gap_s, way_s), longest_s)

    gap_s, _ = _least(lambda gap_s: best_way(gap_s)[1], longest_s)
    return gap_s, best_way(gap_s)[0]


def _error(iterations: Sequence[MeasuredIteration], gap_s: float, way_s: float) -> float:
    """Returns the sum, in seconds, of the absolute errors of the predicted ends of iterations. The
    prediction uses a gap of `gap_s` seconds and a travel time of `way_s` seconds. Stages behave as
    in `simulator.virtual_pipeline`, and plans are sent at the measured times."""
    free_of: dict[int, list[float]] = {}  # by pipeline
    error_s = 0.0
    for each in iterations:
        ready_s = each.start_s + way_s
        free_s = free_of.setdefault(each.pipeline, [0.0] * len(each.stages_s))
        for index, stage_s in enumerate(each.stages_s):
            free_s[index] = max(ready_s, free_s[index]) + stage_s + gap_s
            ready_s = free_s[index] + way_s
        error_s += abs(ready_s - each.end_s)
    return error_s


def _least(of: Callable[[float], float], highest: float) -> tuple[float, float]:
    """Minimises the unimodal function `of` between 0 and `highest`, by a golden-section search.
    Also tries 0 itself. Returns the argument of the minimum, and the minimum."""
    low, high = 0.0, highest
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    of_left, of_right = of(left), of(right)
    for _ in range(N_STEPS):
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - GOLDEN * (high - low)
            of_left = of(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + GOLDEN * (high - low)
            of_right = of(right)
    return min((0.0, of(0.0)), (left, of_left), (right, of_right), key=lambda found: found[1])


def _with_request_s(costs: LinearCosts, lone: Sequence[Lone]) -> LinearCosts:
    """Returns `costs` with the time that a request spends outside of iterations. For each request
    in `lone`, this time is the measured time to the first token minus the predicted time of the
    iteration. The result has the median over these requests."""
    if not lone:
        return costs
    extra_s = [
        one.ttft_s - iteration_s(costs, IterationWork.of([(0, one.n_prompt, True)])) for one in lone
    ]
    return LinearCosts(
        costs.coefficients,
        gap_s=costs.gap_s,
        plan_s=costs.plan_s,
        hop_s=costs.hop_s,
        result_s=costs.result_s,
        request_s=max(0.0, median(extra_s)),
    )


def iteration_s(costs: LinearCosts, work: IterationWork) -> float:
    """Returns the predicted time in seconds of an iteration, from sending its plan to receiving its
    result, while no other iteration runs on the pipeline."""
    stages_s = sum(costs.stage_s(index, work) for index in range(costs.n_stages))
    return stages_s + costs.plan_s + (costs.n_stages - 1) * costs.hop_s + costs.result_s


def _iteration(record: Record, work: IterationWork) -> MeasuredIteration:
    start_s = record.sent_unix_ns / 1e9
    return MeasuredIteration(
        start_s=start_s,
        end_s=start_s + record.round_trip_ns / 1e9,
        stages_s=tuple((stage.compute_ns + stage.send_ns) / 1e9 for stage in record.stages),
        work=work,
        pipeline=record.pipeline,
    )
