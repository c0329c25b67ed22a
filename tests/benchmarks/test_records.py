"""Records: numbers against examples that are worked out by hand, and files."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.records import RequestRecord, RunRecord, Spread, Summary

FIRST = RequestRecord(
    arrival_s=1.0,
    start_s=1.1,
    first_token_s=2.0,
    end_s=5.0,
    n_prompt=10,
    n_output=4,
    token_times_s=(2.0, 2.5, 4.0, 5.0),
)
SECOND = RequestRecord(
    arrival_s=3.0, start_s=3.0, first_token_s=4.0, end_s=6.0, n_prompt=20, n_output=2
)
FAILED = RequestRecord(
    arrival_s=2.0,
    start_s=2.0,
    first_token_s=None,
    end_s=9.0,
    n_prompt=5,
    n_output=0,
    error="HTTP 429: full",
)


def test_latency_counts_from_the_arrival_and_not_from_the_start() -> None:
    assert FIRST.latency_s == 4.0
    assert FIRST.normalised_latency_s == 1.0
    assert FIRST.time_to_first_token_s == 1.0


def test_gaps_are_those_between_tokens_or_their_mean() -> None:
    assert FIRST.gaps_s == [0.5, 1.5, 1.0]
    assert SECOND.gaps_s == [2.0]
    assert dataclasses.replace(FIRST, token_times_s=()).gaps_s == [1.0, 1.0, 1.0]
    assert dataclasses.replace(SECOND, n_output=1).gaps_s == []


def test_a_run_in_numbers() -> None:
    summary = Summary.of([FIRST, SECOND], bound_s=1.2)
    assert summary == Summary(
        n_requests=2,
        n_failed=0,
        duration_s=5.0,
        requests_per_s=0.4,
        output_tokens_per_s=6 / 5,
        tokens_per_s=36 / 5,
        offered_per_s=0.5,
        normalised_latency_s=summary.normalised_latency_s,
        time_to_first_token_s=Spread(1.0, 1.0),
        gap_s=summary.gap_s,
        goodput_per_s=0.2,
    )
    assert summary.normalised_latency_s is not None
    assert summary.gap_s is not None
    # Of 1.0 and 1.5, and of 0.5, 1.0, 1.5 and 2.0.
    assert dataclasses.astuple(summary.normalised_latency_s) == pytest.approx((1.25, 1.495))
    assert dataclasses.astuple(summary.gap_s) == pytest.approx((1.25, 1.985))


def test_a_failure_takes_time_and_brings_nothing() -> None:
    summary = Summary.of([FIRST, FAILED], bound_s=100.0)
    assert (summary.n_requests, summary.n_failed) == (2, 1)
    assert summary.duration_s == 8.0
    assert summary.requests_per_s == summary.goodput_per_s == 1 / 8
    assert summary.normalised_latency_s == Spread(1.0, 1.0)


def test_a_run_of_failures_has_no_latency() -> None:
    summary = Summary.of([FAILED])
    assert summary.requests_per_s == summary.output_tokens_per_s == 0.0
    assert summary.normalised_latency_s is None
    assert summary.gap_s is None
    assert summary.goodput_per_s is None


def test_nothing_is_offered_at_a_rate_when_all_comes_at_once() -> None:
    assert Summary.of([FIRST, dataclasses.replace(SECOND, arrival_s=1.0)]).offered_per_s is None


def test_files_keep_everything(tmp_path: Path) -> None:
    runs = [RunRecord({"rate": 2.0}, (FIRST, SECOND)), RunRecord({"rate": None}, (FAILED,))]
    path = tmp_path / "results" / "runs.json"
    records.write(path, runs)
    assert records.read(path) == runs
