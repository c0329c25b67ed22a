"""The parts of a prediction, and the whole command on the demo model."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import workload
from benchmarks.paper import predict
from benchmarks.paper.comparison import (
    POLICIES,
    Case,
    Comparison,
    Figures,
    PolicyName,
    worst,
)
from benchmarks.records import RequestRecord, RunRecord
from services.tune.calibration import MeasuredIteration
from services.tune.search import Memory
from simulator.costs import IterationWork, LinearCosts
from simulator.outcome import Outcome, RequestTimes
from tests.tune.cases import costs

MEMORY = Memory(100_000)


def requests(rate: float) -> list[workload.PlannedRequest]:
    """A Poisson process of the paper's lengths."""
    lengths = workload.mixed_lengths(40, seed=3)
    arrivals_s = workload.poisson_arrivals(40, rate=rate, seed=3)
    return workload.plan(lengths, arrivals_s, vocab_size=100, seed=3)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stages", [1, 2])
def test_on_a_machine_half_as_fast_half_the_rate_takes_twice_as_long(
    stages: int, policy: PolicyName
) -> None:
    case = Case(stages, policy)
    of = costs(stages)
    fast = predict.predict(case, of, MEMORY, requests(2.0))
    slow = predict.predict(case, predict.slower(of, 2.0), MEMORY, requests(1.0))
    as_fast, as_slow = Figures.predicted(fast), Figures.predicted(slow)
    assert as_slow.tokens_per_s == pytest.approx(as_fast.tokens_per_s / 2)
    assert as_slow.median_latency_s == pytest.approx(2 * as_fast.median_latency_s)


def test_a_policy_is_predicted_with_its_own_batches() -> None:
    outcomes = [
        predict.predict(Case(1, policy), costs(1), MEMORY, requests(50.0)).n_iterations
        for policy in POLICIES
    ]
    assert outcomes[0] < outcomes[1]  # prompts that are cut take more iterations


def test_two_pipelines_are_predicted_to_share_the_requests() -> None:
    many = workload.plan(
        workload.mixed_lengths(200, seed=3), workload.all_at_once(200), vocab_size=100, seed=3
    )
    one, two = (
        predict.predict(Case(1, "chunked", n), costs(1), MEMORY, many).tokens_per_s for n in (1, 2)
    )
    assert 1.7 < two / one < 2.0
    assert str(Case(1, "chunked", 2)) == "2 pipelines of 1 stage, chunked"


def test_speed_is_told_from_iterations_that_took_longer() -> None:
    of = dataclasses.replace(costs(2), gap_s=0.01)
    bare = dataclasses.replace(of, gap_s=0.0)
    works = [IterationWork.of([(n, 1, True)] * n) for n in (1, 7, 30)]
    iterations = [
        MeasuredIteration(
            0.0, 1.0, tuple(1.3 * bare.stage_s(index, work) for index in (0, 1)), work
        )
        for work in works
    ]
    assert predict.speed(of, iterations) == pytest.approx(1.3)


def test_a_run_and_a_prediction_of_the_same_times_have_the_same_figures() -> None:
    times = [(0.0, 0.5, 2.0, 4), (1.0, 1.25, 3.0, 8), (1.5, 3.0, 5.0, 2)]
    outcome = Outcome(
        requests=tuple(RequestTimes(*each) for each in times), n_output=14, duration_s=5.0
    )
    run = RunRecord(
        {},
        tuple(
            RequestRecord(arrival_s, arrival_s, first_s, end_s, 10, n_output)
            for arrival_s, first_s, end_s, n_output in times
        ),
    )
    assert Figures.predicted(outcome) == Figures.measured(run)


def test_a_run_with_a_failure_is_not_compared() -> None:
    failed = RequestRecord(0.0, 0.0, None, 1.0, 10, 0, error="gone")
    with pytest.raises(RuntimeError, match="gone"):
        Figures.measured(RunRecord({}, (failed,)))


def test_the_worst_error_is_the_largest_in_either_direction() -> None:
    real = Figures(100.0, 2.0, 0.1, 0.5, 1.0)
    low, high = (dataclasses.replace(real, tokens_per_s=value) for value in (80.0, 110.0))
    found = [Comparison(1.0, 1.0, real, low, real), Comparison(2.0, 1.0, real, high, real)]
    assert worst(found, "model", "tokens_per_s") == pytest.approx(0.2)
    assert worst(found, "at_speed", "tokens_per_s") == 0.0


def test_slower_costs_keep_their_shape() -> None:
    twice: LinearCosts = predict.slower(dataclasses.replace(costs(1), request_s=0.25), 2.0)
    assert twice.request_s == 0.5
    assert twice.stage_s(0, IterationWork.of([(0, 9, True)])) == pytest.approx(
        2 * costs(1).stage_s(0, IterationWork.of([(0, 9, True)]))
    )


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_command_predicts_and_measures(tmp_path: Path) -> None:
    out, figure = tmp_path / "predict.json", tmp_path / "predict.png"
    arguments = ["models/demo", "--stages", "1", "--policies", "orca", "--rates", "2"]
    arguments += [
        "--calibration-s",
        "2",
        "--run-s",
        "1",
        "--min-requests",
        "6",
        "--out",
        str(out),
        "--figure",
        str(figure),
    ]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.paper.predict", *arguments], check=True, timeout=800
    )
    (case,) = json.loads(out.read_text())["cases"]
    assert case["policy"] == "orca"
    assert case["rates"][0]["real"]["tokens_per_s"] > 0
    assert figure.stat().st_size > 0
