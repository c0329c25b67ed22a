"""Runs engines under one load in turn, and compares their results within each round.

A machine changes over time: it heats up, its memory fragments, other processes use it. So engines
take turns, in reverse order in every second round, and two engines are compared by the ratio of
their results in the same round. The median of these ratios over all rounds is the result. A run
during which other processes used the processors is repeated a few times. If all repetitions are
disturbed too, the run is marked and its round does not count.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from benchmarks import cpu_use
from benchmarks.records import RequestRecord, RunRecord, Summary
from benchmarks.workload import PlannedRequest


class Contestant(Protocol):
    """A running engine with its model loaded."""

    name: str
    about: dict[str, Any]
    """Versions and settings of the engine, for the record."""

    @property
    def pid(self) -> int:
        """Id of the engine's process. The processor time of its descendants is measured too."""

    async def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Sends each request at its arrival time, and returns the records of all requests."""


class WrongAnswer(Exception):
    """An engine did not generate the requested number of tokens, so its times are not
    comparable."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run that is due: an engine in one round."""

    round_index: int
    contestant: Contestant


def turns(contestants: Sequence[Contestant], n_rounds: int) -> Iterator[Turn]:
    """Yields the turns of all rounds: one for each contestant, in reverse order in every second
    round."""
    for round_index in range(n_rounds):
        for contestant in contestants[:: -1 if round_index % 2 else 1]:
            yield Turn(round_index, contestant)


async def measure(
    turn: Turn,
    requests: Sequence[PlannedRequest],
    *,
    meta: Mapping[str, Any],
    n_repeats: int,
    watch: Callable[[int], cpu_use.Watch] = cpu_use.watch,
) -> RunRecord:
    """Runs the requests on the engine whose turn it is. Repeats a run that other processes
    disturbed, up to `n_repeats` times, and returns the least disturbed run.

    Raises:
        WrongAnswer: an output does not have the requested length.
    """
    tries: list[RunRecord] = []
    while len(tries) <= n_repeats:
        with watch(turn.contestant.pid) as use:
            done = await turn.contestant.run(requests)
        check(turn.contestant.name, requests, done)
        about_run = {
            "engine": turn.contestant.name,
            "about": turn.contestant.about,
            "round": turn.round_index,
            "n_repeats": len(tries),
            "own_cpus": round(use.own_cpus, 3),
            "other_cpus": round(use.other_cpus, 3),
            "is_disturbed": use.is_disturbed,
        }
        # The times of single tokens would be most of the file, and nothing here needs them.
        records = tuple(dataclasses.replace(record, token_times_s=()) for record in done)
        tries.append(RunRecord({**meta, **about_run}, records))
        if not use.is_disturbed:
            break
    return min(tries, key=lambda run: float(run.meta["other_cpus"]))


def check(name: str, requests: Sequence[PlannedRequest], done: Sequence[RequestRecord]) -> None:
    """Checks that the output of every request has exactly the requested length.

    Raises:
        WrongAnswer: an output has another length.
    """
    for index, (request, record) in enumerate(zip(requests, done, strict=True)):
        if record.error is not None or record.n_output != request.n_output:
            reason = record.error or f"{record.n_output} tokens instead of {request.n_output}"
            raise WrongAnswer(f"{name}, request {index}: {reason}")


@dataclass(frozen=True, slots=True)
class Range:
    """Median, lowest and highest value of a quantity that was measured in every round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Returns the range of `values`, of which there must be at least one."""
        return cls(statistics.median(values), min(values), max(values))


Measure = Callable[[Summary], float]


def output_rate(summary: Summary) -> float:
    """Returns the output tokens per second of a run."""
    return summary.output_tokens_per_s


def median_latency(summary: Summary) -> float:
    """Returns the median normalised latency of a run, in seconds per token."""
    assert summary.normalised_latency_s is not None
    return summary.normalised_latency_s.median


def p99_latency(summary: Summary) -> float:
    """Returns the 99th percentile of the normalised latency of a run, in seconds per token."""
    assert summary.normalised_latency_s is not None
    return summary.normalised_latency_s.p99


def undisturbed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs of the rounds in which no run was disturbed, or all runs if there is no such
    round.

    A disturbed engine makes the other engines look better, so its whole round is left out.
    """
    disturbed = {run.meta["round"] for run in runs if run.meta["is_disturbed"]}
    return [run for run in runs if run.meta["round"] not in disturbed] or list(runs)


def by_round(runs: Sequence[RunRecord], engine: str, measured: Measure) -> dict[int, float]:
    """Returns the value of `measured` for an engine's run in each round, by the number of the
    round."""
    return {
        run.meta["round"]: measured(run.summary()) for run in runs if run.meta["engine"] == engine
    }


def best(runs: Sequence[RunRecord], engines: Sequence[str], measured: Measure) -> dict[int, float]:
    """Returns the values of `measured` for the best of several engines, by the number of the round.

    The best engine has the best median over all rounds: the highest rate, or the lowest latency.
    Taking the best value of each round would count the noise of several engines as an advantage.
    """
    best_of = max if measured is output_rate else min
    figures = [by_round(runs, engine, measured) for engine in engines]
    return best_of(figures, key=lambda figure: statistics.median(figure.values()))


def ratio(
    runs: Sequence[RunRecord], engine: str, others: Sequence[str], measured: Measure
) -> Range:
    """Returns the range, over all rounds, of the value of `measured` for `engine`, divided by the
    value for the best of the `others`."""
    mine, theirs = by_round(runs, engine, measured), best(runs, others, measured)
    return Range.of([mine[index] / theirs[index] for index in mine])
