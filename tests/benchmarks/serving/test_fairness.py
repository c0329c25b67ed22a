"""The figures of fairness are of what clients got beside what would have been their shares."""

import pytest

from benchmarks.records import RequestRecord
from benchmarks.serving.fairness import Run
from benchmarks.serving.shares import demanded, served
from simulator.fairness import even_shares, jain_index


def record(arrival_s: float, *token_times_s: float, n_prompt: int = 10) -> RequestRecord:
    first_s, last_s = token_times_s[0], token_times_s[-1]
    n_output = len(token_times_s)
    return RequestRecord(arrival_s, arrival_s, first_s, last_s, n_prompt, n_output, token_times_s)


@pytest.mark.parametrize(
    ("total", "demands", "shares"),
    [
        (10, (5, 50), [5, 5]),
        (10, (2, 50), [2, 8]),
        (10, (50, 3, 50), [3.5, 3, 3.5]),
        (10, (2, 3), [2, 3]),
        (10, (0, 30), [0, 10]),
    ],
)
def test_nobody_has_more_than_he_demands_and_the_rest_is_even(
    total: float, demands: tuple[float, ...], shares: list[float]
) -> None:
    assert even_shares(total, demands) == shares


def test_the_index_is_one_where_all_have_their_shares_and_a_half_where_one_of_two_has_all() -> None:
    assert jain_index([2, 8], [2, 50]) == 1
    assert jain_index([0, 10], [20, 50]) == 0.5
    assert jain_index([0, 10], [0, 50]) == 1
    assert jain_index([0, 0], [5, 5]) == 1
    assert 0.5 < jain_index([1, 9], [20, 50]) < 1


def test_tokens_count_when_they_come_and_are_wanted_until_then() -> None:
    of_one = [record(1.0, 4.0, 6.0), record(6.0, 11.0)]
    assert served(of_one, 3) == [11, 1, 11]
    assert demanded(of_one, 3) == [12, 12, 11]


def test_a_run_has_an_index_for_each_window_while_requests_come() -> None:
    run = Run(
        "fcfs",
        is_alone=False,
        records={"small": (record(1.0, 8.0),), "large": (record(1.0, 4.0), record(1.0, 9.0))},
        seconds=10.0,
    )
    assert run.jain() == [0.5, pytest.approx(1.0)]
