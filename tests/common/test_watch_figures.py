"""Figures are sums over whole seconds, and stop when the pipeline rests."""

from collections import Counter
from typing import Any

import pytest

from services.common.watch_figures import LAG_S, MINUTE_S, RECENT_S, Figures, quantile_s, step_of

T = 1_790_000_000


def begun() -> Figures:
    figures = Figures()
    assert list(figures.advance(T)) == []
    return figures


def add(figures: Figures, at: float, *, n_tokens: int = 1, n_spans: int = 1) -> None:
    second = figures.second(T + at)
    second.n_iterations += 1
    second.n_spans += n_spans
    second.n_tokens += n_tokens


def figures_at(figures: Figures, at: float) -> list[dict[str, Any]]:
    return list(figures.advance(T + at))


def test_there_are_none_before_a_second_is_over_and_told() -> None:
    figures = begun()
    add(figures, 0.2)
    assert figures_at(figures, 1 + LAG_S - 0.01) == []
    [only] = figures_at(figures, 1 + LAG_S)
    assert only["t"] == T + 1
    assert only["minute"] == only["recent"]


def test_each_second_counts_in_the_windows_that_hold_it() -> None:
    figures = begun()
    for second in range(10):
        add(figures, second + 0.5, n_tokens=second, n_spans=2)
    last = figures_at(figures, 10 + LAG_S)[-1]
    assert last["minute"]["tokens_per_s"] == sum(range(10)) / 10
    assert last["recent"]["tokens_per_s"] == sum(range(5, 10)) / RECENT_S
    assert last["recent"]["iterations_per_s"] == 1
    assert last["recent"]["batch_size"] == 2


def test_seconds_without_events_are_made_up_for_and_rest_is_told_once() -> None:
    figures = begun()
    add(figures, 0.5)
    told = figures_at(figures, 1000)
    assert [each["t"] - T for each in told] == list(range(1, MINUTE_S + 2))
    assert [each["recent"]["tokens_per_s"] > 0 for each in told[:6]] == [True] * 5 + [False]
    assert told[-1]["minute"]["tokens_per_s"] == 0
    assert figures_at(figures, 5000) == []
    add(figures, 5000.2)
    assert [each["t"] - T for each in figures_at(figures, 5002)] == [5000, 5001]


def test_an_iteration_that_is_told_too_late_counts_in_the_next_second() -> None:
    figures = begun()
    add(figures, 0.1)
    figures_at(figures, 3)
    add(figures, 0.9, n_tokens=7)
    assert figures_at(figures, 4)[-1]["minute"]["tokens_per_s"] == pytest.approx(8 / 3, rel=1e-3)


def test_a_clock_that_goes_back_has_no_figures_until_it_has_caught_up() -> None:
    figures = begun()
    add(figures, 0.1)
    assert len(figures_at(figures, 3)) == 2
    assert figures_at(figures, 1) == []
    assert [each["t"] - T for each in figures_at(figures, 4)] == [3]


@pytest.mark.parametrize(("part", "expected"), [(0.0, 0.01), (0.5, 0.02), (0.9, 3.0)])
def test_a_quantile_is_as_exact_as_its_steps(part: float, expected: float) -> None:
    durations = Counter(map(step_of, (0.01, 0.01, 0.02, 3.0)))
    assert quantile_s(durations, part) == pytest.approx(expected, rel=0.006)
    assert quantile_s(Counter(), part) is None
