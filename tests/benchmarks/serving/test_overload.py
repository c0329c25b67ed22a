"""The figures of an overload are of what ended while requests came."""

import json

from benchmarks.records import RequestRecord
from benchmarks.serving.overload import Overloaded, arrivals, figures

REFUSED = "HTTP 429: {}"


def record(end_s: float, error: str | None = None, *, start_s: float = 0.0) -> RequestRecord:
    first_s = None if error else end_s
    n_output = 0 if error else 1
    return RequestRecord(start_s, start_s, first_s, end_s, 1, n_output, error=error)


def of(*records: RequestRecord, on_time_s: float = float("inf")) -> Overloaded:
    return figures(
        "http",
        records,
        on_time_s=on_time_s,
        capacity_per_s=1.0,
        window_s=(2.0, 6.0),
        growth=0.0,
        client_cpus=0.0,
    )


def test_goodput_counts_what_was_complete_within_the_window() -> None:
    result = of(*map(record, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)))
    assert result.goodput_per_s == 1.0
    assert result.n_complete == 7


def test_an_answer_counts_by_the_part_of_its_tokens_within_the_window() -> None:
    inside = RequestRecord(0.0, 0.0, 2.0, 5.9, 1, 4, (2.0, 3.0, 5.0, 5.9))
    half = RequestRecord(0.0, 0.0, 1.0, 3.0, 1, 4, (1.0, 1.9, 2.0, 3.0))
    after = RequestRecord(0.0, 0.0, 6.0, 7.0, 1, 2, (6.0, 7.0))
    assert of(inside, half, after).goodput_per_s == 1.5 / 4


def test_an_answer_whose_first_token_nobody_saw_is_not_on_time() -> None:
    seen = RequestRecord(0.0, 0.0, 3.0, 4.0, 1, 2)
    unseen = RequestRecord(0.0, 0.0, None, 4.0, 1, 2)
    result = of(seen, unseen)
    assert (result.goodput_per_s, result.on_time_per_s) == (2 / 4, 1 / 4)


def test_late_answers_are_counted_with_how_late_they_were() -> None:
    result = of(*map(record, (2.0, 2.5, 2.75, 5.0)), record(3.0, REFUSED), on_time_s=2.5)
    assert result.n_late == 2
    assert result.late_s is not None
    assert result.late_s.median == (0.25 + 2.5) / 2
    assert of(record(2.0)).late_s is None


def test_a_slow_refusal_is_not_held() -> None:
    answers = [record(end_s) for end_s in (2.0, 3.0, 4.0, 5.0)]
    quick = of(*answers, record(3.01, REFUSED, start_s=3.0))
    slow = of(*answers, record(3.5, REFUSED, start_s=3.0))
    assert quick.is_held
    assert not slow.is_held


def test_any_other_end_than_an_answer_or_a_refusal_is_not_held() -> None:
    answers = [record(end_s) for end_s in (2.0, 3.0, 4.0, 5.0)]
    refusal = record(3.01, "ConnectionError: RESOURCE_EXHAUSTED: full", start_s=3.0)
    assert of(*answers, refusal).is_held
    assert not of(*answers, refusal, record(3.0, "HTTP 500: {}")).is_held


def test_requests_come_as_often_as_they_should() -> None:
    requests = arrivals(100.0, 50.0, seed=1)
    assert len(requests) == 5000
    assert 45.0 < requests[-1].arrival_s < 55.0


def test_a_record_has_the_parts_that_are_printed_and_other_ends_by_their_names() -> None:
    answers = [record(end_s) for end_s in (2.0, 3.0, 4.0)]
    refusal = record(3.01, REFUSED, start_s=3.0)
    row = of(*answers, refusal, record(3.0, "HTTP 500: {}")).row()
    assert json.loads(json.dumps(row)) == row
    assert (row["goodput_part"], row["on_time_part"]) == (0.75, 0.75)
    assert row["refusal_s"] == {"median": 0.01, "p99": 0.01}
    assert row["others"] == {"HTTP 500: {}": 1}
