"""Cells of a lane show what a stage computed, and when."""

import pytest

from services.console.console_state import DrawnIteration
from services.console.lanes import busy_share, cells_of, window_for


def at(number: int, start: float, end: float) -> DrawnIteration:
    """An iteration that the only stage computes in that time."""
    return DrawnIteration(number, start, end - start, number, "d", ((start, end),))


def drawn(iterations: list[DrawnIteration], n_cells: int = 10, window_s: float = 10.0) -> str:
    """The numbers of the iterations by cell, the first of each with a mark behind it."""
    cells = cells_of(iterations, 0, end=10.0, window_s=window_s, n_cells=n_cells)
    return "".join(
        "." if cell is None else f"{cell.iteration.number}{'|' * cell.is_first}" for cell in cells
    )


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        ([], ".........."),
        ([at(1, 2.0, 4.0)], "..1|1......"),
        ([at(1, 2.0, 3.0), at(2, 3.0, 5.0)], "..1|2|2....."),
        ([at(1, 2.0, 3.4), at(2, 3.4, 5.0)], "..1|2|2....."),
        ([at(1, -5.0, 1.0)], "1|........."),
        ([at(1, 9.5, 20.0)], ".........1|"),
        ([at(1, -9.0, -8.0), at(2, 11.0, 12.0)], ".........."),
    ],
    ids=["none", "one", "two", "the-one-with-more", "before", "still", "outside"],
)
def test_a_cell_shows_the_iteration_that_had_most_of_it(
    iterations: list[DrawnIteration], expected: str
) -> None:
    assert drawn(iterations) == expected


def test_a_stage_that_an_iteration_says_nothing_of_is_idle() -> None:
    assert cells_of([at(1, 0.0, 9.0)], 1, end=10.0, window_s=10.0, n_cells=3) == [None] * 3


def test_the_busy_share_is_of_the_window() -> None:
    assert busy_share([at(1, -5.0, 2.0), at(2, 4.0, 7.0)], 0, end=10.0, window_s=10.0) == 0.5


@pytest.mark.parametrize(
    ("duration", "window_s"), [(0.001, 0.5), (0.05, 1.0), (0.3, 5.0), (9.0, 60.0)]
)
def test_the_window_suits_the_iterations(duration: float, window_s: float) -> None:
    assert window_for([at(i, i * duration, (i + 1) * duration) for i in range(5)], 64) == window_s
    assert window_for([], 64) == 2.0
