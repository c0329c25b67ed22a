"""The figures of a run count what came in the window."""

import pytest

from benchmarks.placement.figures import Figures
from simulator.fairness import Window
from simulator.outcome import Outcome, RequestTimes

WINDOW = Window(10.0, 20.0)


@pytest.mark.parametrize(
    ("first_s", "end_s", "n_output", "inside"),
    [(12.0, 16.0, 5, 5.0), (8.0, 12.0, 5, 2.0), (18.0, 22.0, 5, 3.0), (12.0, 12.0, 1, 1.0)],
)
def test_tokens_are_spread_over_the_time_of_an_answer(
    first_s: float, end_s: float, n_output: int, inside: float
) -> None:
    request = RequestTimes(0.0, first_s, end_s, n_output, n_prompt=100)
    assert WINDOW.n_output(request) == pytest.approx(inside)
    assert WINDOW.n_tokens(request) == inside + 100 * (first_s >= 10)


def test_a_client_that_waits_while_another_is_served_lowers_the_index() -> None:
    def served(account: str, first_s: float) -> RequestTimes:
        return RequestTimes(9.0, first_s, first_s + 1, 11, account, n_prompt=100)

    even = Outcome((served("a", 12.0), served("b", 13.0)), 22, 30.0)
    uneven = Outcome((served("a", 12.0), served("a", 13.0), served("b", 25.0)), 33, 30.0)
    assert Figures.of(even, 0.5, WINDOW).jain == 1.0
    assert Figures.of(uneven, 0.5, WINDOW).jain == pytest.approx(0.5)
    assert Figures.of(even, 0.5, WINDOW).tokens_per_s == pytest.approx(2.2)
