"""Turns and ratios: engines whose times are made up."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.cpu_use import CpuUse
from benchmarks.peers import contest
from benchmarks.peers.contest import Range, Turn, WrongAnswer
from benchmarks.records import RequestRecord, RunRecord
from benchmarks.workload import PlannedRequest

REQUESTS = [PlannedRequest(0.0, (1, 2), 4), PlannedRequest(0.0, (3,), 6)]


def records_of(duration_s: float, *, n_output: int = 10) -> tuple[RequestRecord, ...]:
    """One request of this length."""
    return (RequestRecord(0.0, 0.0, duration_s / 2, duration_s, 1, n_output),)


class FakeEngine:
    """Does what it is told, and remembers how often."""

    pid = 1

    def __init__(self, name: str = "fake", n_missing: int = 0, error: str | None = None) -> None:
        self.name = name
        self.about: dict[str, Any] = {"version": "1"}
        self.n_runs = 0
        self._n_missing = n_missing
        self._error = error

    async def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        self.n_runs += 1
        return [
            RequestRecord(
                each.arrival_s,
                0.0,
                0.5,
                self.n_runs,
                each.n_prompt,
                each.n_output - self._n_missing,
                token_times_s=(0.5, 1.0),
                error=self._error,
            )
            for each in requests
        ]


class FakeMachine:
    """Others use so many cores in one run after the other."""

    def __init__(self, *other_cpus: float) -> None:
        self._other_cpus = iter(other_cpus)

    @contextlib.contextmanager
    def watch(self, engine: int | None = None) -> Iterator[CpuUse]:
        use = CpuUse()
        yield use
        use.other_cpus = next(self._other_cpus)


async def measure(engine: FakeEngine, *other_cpus: float, n_repeats: int = 2) -> RunRecord:
    return await contest.measure(
        Turn(3, engine),
        REQUESTS,
        meta={"case": "offline"},
        n_repeats=n_repeats,
        watch=FakeMachine(*other_cpus).watch,
    )


def test_engines_take_turns_in_the_opposite_order_every_second_round() -> None:
    engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c")]
    order = [(turn.round_index, turn.contestant.name) for turn in contest.turns(engines, 3)]

    assert [name for _, name in order] == list("abccbaabc")
    assert [index for index, _ in order] == [0] * 3 + [1] * 3 + [2] * 3


async def test_a_run_says_whose_it_is_and_drops_the_times_of_tokens() -> None:
    run = await measure(FakeEngine(), 0.01)

    assert {key: run.meta[key] for key in ("case", "engine", "round", "about")} == {
        "case": "offline",
        "engine": "fake",
        "round": 3,
        "about": {"version": "1"},
    }
    assert [record.token_times_s for record in run.requests] == [(), ()]


async def test_a_disturbed_run_is_repeated_until_nothing_disturbs_it() -> None:
    engine = FakeEngine()
    run = await measure(engine, 0.8, 0.02, n_repeats=5)

    assert engine.n_runs == 2
    assert (run.meta["is_disturbed"], run.meta["n_repeats"]) == (False, 1)


async def test_of_disturbed_runs_the_least_disturbed_is_kept_and_marked() -> None:
    engine = FakeEngine()
    run = await measure(engine, 0.8, 0.2, 0.5)

    assert engine.n_runs == 3
    assert (run.meta["is_disturbed"], run.meta["other_cpus"]) == (True, 0.2)
    assert run.requests[0].end_s == 2


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (FakeEngine(n_missing=1), "fake, request 0: 3 tokens instead of 4"),
        (FakeEngine(error="HTTP 500"), "fake, request 0: HTTP 500"),
    ],
    ids=["length", "error"],
)
async def test_a_wrong_answer_is_no_result(engine: FakeEngine, reason: str) -> None:
    with pytest.raises(WrongAnswer, match=reason):
        await measure(engine, 0.0)


def runs_of(durations_s: dict[str, list[float]]) -> list[RunRecord]:
    """Runs of ten tokens by engine and round."""
    return [
        RunRecord({"engine": engine, "round": index}, records_of(duration_s))
        for engine, each in durations_s.items()
        for index, duration_s in enumerate(each)
    ]


def test_ratios_are_taken_within_a_round() -> None:
    # The machine gets slower all the time, so a comparison across rounds would be wrong.
    runs = runs_of({"a": [1.0, 10.0, 100.0], "b": [2.0, 20.0, 200.0]})

    assert contest.ratio(runs, "a", ["b"], contest.output_rate) == Range(2.0, 2.0, 2.0)
    assert contest.ratio(runs, "a", ["b"], contest.median_latency) == Range(0.5, 0.5, 0.5)


def test_a_ratio_says_how_far_it_went() -> None:
    runs = runs_of({"a": [1.0, 1.0, 1.0], "b": [1.0, 3.0, 2.0]})

    assert contest.ratio(runs, "a", ["b"], contest.output_rate) == Range(2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    "measured",
    [contest.output_rate, contest.median_latency, contest.p99_latency],
    ids=["rate", "median", "p99"],
)
def test_the_best_is_one_engine_for_all_rounds(measured: contest.Measure) -> None:
    runs = runs_of({"steady": [2.0, 2.0, 2.0], "wild": [1.0, 9.0, 9.0]})

    best = contest.best(runs, ["wild", "steady"], measured)
    assert best == contest.by_round(runs, "steady", measured)


def test_a_round_in_which_somebody_was_disturbed_does_not_count() -> None:
    runs = [
        RunRecord({"engine": engine, "round": index, "is_disturbed": is_disturbed}, records_of(1.0))
        for engine, index, is_disturbed in [
            ("a", 0, False),
            ("b", 0, True),
            ("b", 1, False),
            ("a", 1, False),
        ]
    ]

    assert contest.undisturbed(runs) == runs[2:]
    assert contest.undisturbed(runs[:2]) == runs[:2]
