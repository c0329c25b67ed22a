"""Records of iterations become the costs that they were made of."""

import random
from itertools import count

import pytest
from orcinus.v1 import watch_pb2

from services.tune.calibration import calibrate, costs_of_run, iteration_s, iterations_of
from services.tune.probe import Lone
from services.tune.system import Record
from simulator.costs import IterationWork, LinearCosts
from tests.tune.cases import costs

NS = 1_000_000_000
NUMBERS: dict[str, int] = {}
"""Numbers of requests, by their names."""


def record(
    iteration: int,
    start_s: float,
    end_s: float,
    spans: list[tuple[str, int, int]],
    stages: list[float],
) -> Record:
    """The record of an iteration; spans are request, start position, tokens."""
    return Record(
        iteration=iteration,
        sent_unix_ns=round(start_s * NS),
        round_trip_ns=round((end_s - start_s) * NS),
        numbers=[NUMBERS.setdefault(name, len(NUMBERS)) for name, _, _ in spans],
        start_positions=[start for _, start, _ in spans],
        n_tokens=[n_tokens for _, _, n_tokens in spans],
        stages=[watch_pb2.StageTimes(compute_ns=round(stage_s * NS)) for stage_s in stages],
    )


def test_only_the_last_piece_of_a_prompt_is_sampled() -> None:
    records = [
        record(2, 1, 2, [("a", 8, 4), ("b", 3, 1)], [0.1]),
        record(1, 0, 1, [("a", 0, 8), ("b", 2, 1)], [0.1]),
        record(3, 2, 3, [("a", 12, 1)], [0.1]),
    ]
    assert [each.work.n_sampled for each in iterations_of(records)] == [1, 2, 1]


def run(true: LinearCosts, n: int, *, pipeline: int = 0) -> list[Record]:
    """Records of a full pipeline of one stage: each iteration is sent before the last returns;
    every tenth finds it empty."""
    source, numbers = random.Random(pipeline), count(1)
    made, free_s, sent_s = [], 0.0, 0.0
    for index in range(n):
        name = f"{pipeline}.{index}"
        spans = [(f"{name}.{i}", source.randrange(500), 1) for i in range(source.randrange(1, 40))]
        if index % 3 == 0:
            spans.append((f"{name}.prompt", 0, source.randrange(2, 400)))
        work = IterationWork.of((start, n_tokens, True) for _, start, n_tokens in spans)
        if index % 10 == 0:
            sent_s = free_s + 1.0
        begun_s = max(free_s, sent_s + true.plan_s)
        free_s = begun_s + true.stage_s(0, work)
        stages = [true.stage_s(0, work) - true.gap_s]
        made.append(record(next(numbers), sent_s, free_s + true.result_s, spans, stages))
        made[-1].pipeline = pipeline
        sent_s = begun_s
    return made


@pytest.mark.parametrize("n_pipelines", [1, 2])
def test_costs_are_recovered_from_records(n_pipelines: int) -> None:
    true = LinearCosts(costs().coefficients, gap_s=0.002, plan_s=0.003, result_s=0.003)
    lone = [
        Lone(n, iteration_s(true, IterationWork.of([(0, n, True)])) + 0.05) for n in (10, 20, 300)
    ]
    records = [one for pipeline in range(n_pipelines) for one in run(true, 300, pipeline=pipeline)]
    random.Random(1).shuffle(records)
    found = calibrate(iterations_of(records), lone)
    assert found.error < 0.01
    assert found.costs.gap_s == pytest.approx(0.002, rel=0.01)
    assert found.costs.plan_s + found.costs.result_s == pytest.approx(0.006, rel=0.01)
    assert found.costs.request_s == pytest.approx(0.05, rel=0.05)
    for work in (IterationWork.of([(100, 1, True)] * 32), IterationWork.of([(0, 256, True)])):
        assert found.costs.stage_s(0, work) == pytest.approx(true.stage_s(0, work), rel=0.02)


def run_in_two_stages(true: LinearCosts, n: int) -> list[Record]:
    """Records of two stages with two batches in flight: one of prompts, which takes long, and one
    that does not. Every tenth pair finds the pipeline empty."""
    source = random.Random(1)
    free_s, ends_s, made = [0.0, 0.0], [0.0, 0.0], []
    for index in range(n):
        if index % 2:
            spans = [(f"{index}.{i}", source.randrange(500), 1) for i in range(4)]
        else:
            spans = [(f"{index}.prompt", 0, source.randrange(50, 400))]
        sent_s = max(ends_s) + 1.0 if index % 20 == 0 else ends_s[-2]
        work = IterationWork.of((start, n_tokens, True) for _, start, n_tokens in spans)
        ready_s = sent_s + true.plan_s
        for stage in range(2):
            free_s[stage] = max(ready_s, free_s[stage]) + true.stage_s(stage, work)
            ready_s = free_s[stage] + (true.hop_s if stage == 0 else true.result_s)
        ends_s.append(ready_s)
        stages = [true.stage_s(stage, work) - true.gap_s for stage in range(2)]
        made.append(record(index + 1, sent_s, ready_s, spans, stages))
    return made


@pytest.mark.parametrize(("gap_s", "way_s"), [(0.0, 0.0), (0.002, 0.0005), (0.0, 0.003)])
def test_gaps_and_ways_are_told_apart_where_iterations_are_uneven(
    gap_s: float, way_s: float
) -> None:
    true = LinearCosts(
        costs(2).coefficients, gap_s=gap_s, plan_s=way_s, hop_s=way_s, result_s=way_s
    )
    found = calibrate(iterations_of(run_in_two_stages(true, 200))).costs
    assert found.gap_s == pytest.approx(gap_s, abs=2e-5)
    assert found.hop_s == pytest.approx(way_s, abs=2e-5)


def test_the_costs_of_a_run_contain_its_slow_iterations() -> None:
    true = costs()
    records = run(true, 300)
    for one in records[::10]:
        one.stages[0].compute_ns *= 6
    iterations = iterations_of(records)
    measured_s = sum(each.stages_s[0] for each in iterations)

    def predicted_s(found: LinearCosts) -> float:
        return sum(found.stage_s(0, each.work) - found.gap_s for each in iterations)

    assert predicted_s(calibrate(iterations).costs) < 0.75 * measured_s
    assert predicted_s(costs_of_run(iterations)) == pytest.approx(measured_s)


def test_no_iterations_are_no_calibration() -> None:
    for of in (calibrate, costs_of_run):
        with pytest.raises(ValueError, match="no iteration"):
            of([])
