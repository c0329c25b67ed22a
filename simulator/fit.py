"""Finds the coefficients of a cost model from measured iterations.

Errors are relative, so that short iterations count as much as long ones. Coefficients are not
negative: a time that falls with more work would be noise. On a machine with other work, some
iterations take much longer than usual. So large errors count only in proportion to their size
(Huber's loss, by reweighting). A small penalty on the difference of neighbouring slopes makes a
slope that no iteration determines equal to the slope beside it.
"""

from collections.abc import Sequence

from simulator.costs import dot

HUBER = 0.1
"""Relative error above which an error counts in proportion to its size and not to its square."""

N_REWEIGHTINGS = 8
N_SWEEPS = 400
RIDGE = 1e-9
"""Fraction of each coefficient's curvature that is added to this curvature, so that there is
exactly one solution."""

SMOOTHNESS = 1e-3
"""Weight of the penalty on a difference of neighbouring slopes; the relative error of an iteration
has the weight 1."""


def fit(
    rows: Sequence[Sequence[float]],
    times_s: Sequence[float],
    *,
    neighbours: Sequence[tuple[int, int]] = (),
) -> tuple[float, ...]:
    """Returns non-negative coefficients such that the product with each row of features is close to
    the row's time. `neighbours` are pairs of coefficients that are made alike where the data does
    not determine them.

    Raises:
        ValueError: there are no rows, another number of rows than of times, or a time is not
            positive.
    """
    if not rows or len(rows) != len(times_s):
        raise ValueError(f"{len(rows)} rows of features for {len(times_s)} times")
    if min(times_s) <= 0:
        raise ValueError("a time is not positive")
    relative = [
        [value / time_s for value in row] for row, time_s in zip(rows, times_s, strict=True)
    ]
    # A difference is scaled with the largest relative feature, so that it weighs like the error of
    # an iteration in which one slope takes the place of the other.
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
    """Returns the median of the absolute relative errors of the predicted times. The predicted time
    of a row is its product with `coefficients`."""
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
    """Returns the coefficients, none negative, whose products with `rows` are closest to 1.
    Computed by coordinate descent from `start`. `weights` has a weight for the squared error of
    each row. Each link is a pair of coefficients and the weight of the penalty on their
    difference."""
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
