"""Features add up to the work, and fitting finds the costs that times were made of."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs import KNOTS, N_FEATURES, SLOPES, IterationWork, LinearCosts, dot, features
from simulator.fit import fit, median_error

TRUE = (5e-3, 2e-4, 2e-4, 1e-4, 3e-4, 3e-4, 4e-4, 5e-5, 1e-7, 2e-8)


def works(n: int, *, seed: int = 0) -> list[IterationWork]:
    """Batches of decodes and prompts of all sizes."""
    source = random.Random(seed)
    made = []
    for _ in range(n):
        decodes = [(source.randrange(600), 1, True)] * source.choice((0, 1, 4, 16, 48, 128))
        prompts = [(source.randrange(2) * 256, source.choice((8, 64, 300, 900)), False)]
        made.append(IterationWork.of([*decodes, *prompts[: source.randrange(2) or not decodes]]))
    return made


def test_work_counts_tokens_slots_and_pairs() -> None:
    assert IterationWork.of([(9, 1, True), (0, 4, False), (4, 2, True)]) == IterationWork(
        n_tokens=7,
        n_sampled=2,
        n_decode_slots=10,
        n_prompt_pairs=1 + 2 + 3 + 4 + 5 + 6,
        n_spans=3,
    )


@given(st.integers(0, 5000))
def test_the_parts_between_knots_add_up_to_the_tokens(n_tokens: int) -> None:
    row = features(IterationWork(n_tokens, 0, 0, 0, 0))
    assert len(row) == N_FEATURES
    assert sum(row[1 : 1 + len(KNOTS)]) == n_tokens


def test_fitting_recovers_the_costs_that_times_were_made_of() -> None:
    made = works(400)
    rows = [features(work) for work in made]
    found = fit(rows, [dot(TRUE, row) for row in rows])
    unseen = LinearCosts((found,)), LinearCosts((TRUE,))
    for work in works(100, seed=1):
        assert unseen[0].stage_s(0, work) == pytest.approx(unseen[1].stage_s(0, work), rel=0.01)


def test_iterations_that_were_held_up_do_not_count() -> None:
    source = random.Random(2)
    made = works(400)
    rows = [features(work) for work in made]
    times_s = [
        dot(TRUE, row) * source.uniform(0.98, 1.02) * source.choice((1,) * 9 + (5,)) for row in rows
    ]
    found = fit(rows, times_s)
    true_s = [dot(TRUE, row) for row in rows]
    assert median_error(found, rows, true_s) < 0.03


def test_a_slope_that_nothing_shows_is_its_neighbours() -> None:
    made = [work for work in works(400) if work.n_tokens <= KNOTS[-1]]
    rows = [features(work) for work in made]
    found = fit(rows, [dot(TRUE, row) for row in rows], neighbours=list(pairwise(SLOPES)))
    large = features(IterationWork.of([(0, 2000, False)]))
    assert dot(found, large) == pytest.approx(dot(TRUE, large), rel=0.25)


@given(st.lists(st.floats(1e-4, 10.0), min_size=3, max_size=12))
def test_coefficients_are_never_negative(times_s: list[float]) -> None:
    rows = [(1.0, float(index)) for index in range(len(times_s))]  # times may fall with more work
    assert min(fit(rows, times_s)) >= 0


@pytest.mark.parametrize(
    ("rows", "times_s"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([(1.0,)], [0.0], id="no time"),
        pytest.param([(1.0,)], [1.0, 2.0], id="other many times"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    rows: list[tuple[float, ...]], times_s: list[float]
) -> None:
    with pytest.raises(ValueError, match=r"time"):
        fit(rows, times_s)
