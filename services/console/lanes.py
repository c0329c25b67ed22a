"""Draws lanes: for each stage a line of cells, which shows the iterations of the last seconds.

A cell stands for a short period of time, and shows the iteration that took most of the period. The
functions are pure: the time is an argument.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.console.console_state import DrawnIteration

WINDOWS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MIN_CELLS = 2
"""Least number of cells that an iteration of median length must cover."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A short period of time, and the iteration that a stage computed in most of the period."""

    iteration: DrawnIteration
    is_first: bool
    """Whether the iteration begins in this cell: the cell to the left shows another iteration or
    none."""


def window_for(iterations: Sequence[DrawnIteration], n_cells: int) -> float:
    """Returns the number of seconds that a line of `n_cells` cells must cover.

    This is the largest number of `WINDOWS_S` with which an iteration of median length covers at
    least `MIN_CELLS` cells, or the smallest number if there is none.
    """
    durations = sorted(
        end - start for it in iterations[-200:] for start, end in it.computing if end > start
    )
    if not durations:
        return WINDOWS_S[2]
    usual = durations[len(durations) // 2]
    fitting = [window for window in WINDOWS_S if usual / window * n_cells >= MIN_CELLS]
    return max(fitting, default=WINDOWS_S[0])


def cells_of(
    iterations: Iterable[DrawnIteration], stage: int, *, end: float, window_s: float, n_cells: int
) -> list[Cell | None]:
    """Returns the `n_cells` cells of a stage, which cover the `window_s` seconds before `end`.

    A cell is None if the stage was idle.
    """
    begin, size = end - window_s, window_s / n_cells
    best: list[tuple[float, DrawnIteration | None]] = [(0.0, None)] * n_cells
    for iteration in iterations:
        if stage >= len(iteration.computing):
            continue
        started, ended = iteration.computing[stage]
        first, last = int((started - begin) // size), int((ended - begin) // size)
        for place in range(max(first, 0), min(last, n_cells - 1) + 1):
            left = begin + place * size
            overlap = min(ended, left + size) - max(started, left)
            if overlap > best[place][0]:
                best[place] = (overlap, iteration)
    found = [iteration for _, iteration in best]
    return [
        None
        if iteration is None
        else Cell(iteration, place == 0 or found[place - 1] is not iteration)
        for place, iteration in enumerate(found)
    ]


def busy_share(
    iterations: Iterable[DrawnIteration], stage: int, *, end: float, window_s: float
) -> float:
    """Returns the fraction of the `window_s` seconds before `end` in which a stage computed."""
    begin = end - window_s
    busy = sum(
        max(0.0, min(ended, end) - max(started, begin))
        for it in iterations
        for started, ended in it.computing[stage : stage + 1]
    )
    return min(1.0, busy / window_s)
