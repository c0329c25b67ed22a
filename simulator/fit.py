"""Finds the coefficients of a cost model from iterations that were measured.

Errors are relative, so that short iterations count as much as long ones. Coefficients are not
negative: a time that falls with more work would be noise. On a machine that does other things too,
some iterations take much longer than they should, so large errors count only in proportion to
their size (Huber's loss, by reweighting). Where no iteration shows what the slope between two knots
is, it is taken to be the one beside it: a little counts that neighbouring slopes differ.
"""

from collections.abc import Sequence

from simulator.costs import dot

HUBER = 0.1
"""Relative error from which on an error counts in proportion to its size, and not to its square."""

N_REWEIGHTINGS = 8
N_SWEEPS = 400
RIDGE = 1e-9
"""Part of each coefficient's curvature that is added, so that there is one solution."""

SMOOTHNESS = 1e-3
"""Weight of a difference of neighbouring slopes, where a relative error of an iteration has 1."""


def fit(
    rows: Sequence[Sequence[float]],
    times_s: Sequence[float],
    *,
    neighbours: Sequence[tuple[int, int]] = (),
) -> tuple[float, ...]:
    """Returns non-negative coefficients with which rows of features give times, nearly. The
    coefficients of `neighbours` are alike as far as the data does not say otherwise.

    Raises:
        ValueError: there is nothing to fit, or a time is not positive.
    """
    if not rows or len(rows) != len(times_s):
        raise ValueError(f"{len(rows)} rows of features for {len(times_s)} times")
    if min(times_s) <= 0:
        raise ValueError("a time is not positive")
    relative = [
        [value / time_s for value in row] for row, time_s in zip(rows, times_s, strict=True)
    ]
    # As errors of a batch of a usual size would be, if one of the two had the other's slope.
    largest = [max(column) for column in zip(*relative, strict=True)]
    links = [(i, j, SMOOTHNESS * max(largest[i], largest[j]) ** 2) for i, j in neighbours]
    weights = [1.0] * len(rows)
    coefficients = [0.0] * len(rows[0])
    for _ in range(N_REWEIGHTINGS):
        coefficients = _weighted(relative, weights, coefficients, links)
        errors = [abs(dot(coefficients, row) - 1.0) for row in relative]
        weights = [1.0 if error <= HUBER else HUBER / error for error in errors]
    return tuple(coefficients)


def median_error(
    coefficients: Sequence[float], rows: Sequence[Sequence[float]], times_s: Sequence[float]
) -> float:
    """Returns the median of the relative errors, without their signs."""
    errors = sorted(
        abs(dot(coefficients, row) / time_s - 1.0)
        for row, time_s in zip(rows, times_s, strict=True)
    )
    return errors[len(errors) // 2]


def _weighted(
    rows: Sequence[Sequence[float]],
    weights: Sequence[float],
    start: Sequence[float],
    links: Sequence[tuple[int, int, float]],
) -> list[float]:
    """Returns the non-negative least squares for a target of ones, by descent along one coefficient
    after the other. `links` are two coefficients each, and the weight of their difference."""
    n = len(start)
    columns = list(zip(*rows, strict=True))
    weighted = [list(map(float.__mul__, column, weights)) for column in columns]
    gram = [[dot(left, right) for right in columns] for left in weighted]
    target = [sum(column) for column in weighted]
    for i, j, weight in links:
        gram[i][i] += weight
        gram[j][j] += weight
        gram[i][j] -= weight
        gram[j][i] -= weight
    x = list(start)
    for _ in range(N_SWEEPS):
        largest_change = 0.0
        for i in range(n):
            curvature = gram[i][i] * (1 + RIDGE)
            if curvature == 0.0:
                continue
            slope = target[i] - dot(gram[i], x)
            value = max(0.0, x[i] + slope / curvature)
            largest_change = max(largest_change, abs(value - x[i]) * curvature**0.5)
            x[i] = value
        if largest_change < 1e-9:
            break
    return x
