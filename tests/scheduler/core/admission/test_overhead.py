"""The overhead of an iteration is learned where iterations tell it, and else stays what it is."""

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.iteration_time import N_NEEDED, IterationTime
from services.scheduler.core.admission.overhead import (
    MAX_OVERHEAD_TOKENS,
    MIN_OVERHEAD_TOKENS,
    Overhead,
)
from services.scheduler.core.admission.prompt_groups import FIRST_OVERHEAD_TOKENS

SIZES = (0, 0, 0, 5, 30, 60, 200)
TOKEN_S = 0.0002


def learned(iterations: Iterable[tuple[int, float]]) -> list[int]:
    """Returns the overhead after each iteration, of so many tokens of prompts and seconds."""
    time = IterationTime()
    overhead = Overhead(time)
    found = []
    for n_prompt_tokens, time_s in iterations:
        time.learn(n_prompt_tokens, time_s)
        overhead.note(n_prompt_tokens)
        found.append(overhead.n_tokens)
    return found


def iterations(
    overhead_tokens: float,
    n: int,
    *,
    sizes: tuple[int, ...] = SIZES,
    noise: float = 0.2,
    seed: int = 0,
) -> list[tuple[int, float]]:
    """Returns iterations of a machine with this overhead, whose times are off by up to `noise`."""
    chance = random.Random(seed)
    return [
        (size, TOKEN_S * (overhead_tokens + size) * (1 + noise * chance.uniform(-1, 1)))
        for size in chance.choices(sizes, k=n)
    ]


@pytest.mark.parametrize(
    ("overhead_tokens", "near"),
    [(3, {8}), (12, {8, 16}), (40, {32, 64}), (64, {64}), (300, {256, 512}), (5000, {512})],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_overhead_is_learned(overhead_tokens: int, near: set[int], seed: int) -> None:
    assert learned(iterations(overhead_tokens, 1000, seed=seed))[-1] in near


def test_another_machine_is_learned_again() -> None:
    found = learned([*iterations(300, 1000), *iterations(12, 2000), *iterations(300, 2000)])
    assert found[999] >= 256
    assert found[2999] <= 16
    assert found[-1] >= 256


def test_nothing_is_said_before_enough_is_known() -> None:
    assert set(learned(iterations(300, N_NEEDED - 1))) == {FIRST_OVERHEAD_TOKENS}


@given(
    n_tokens=st.integers(0, 2000),
    times_s=st.lists(st.floats(1e-5, 10.0), min_size=100, max_size=200),
)
def test_iterations_that_are_all_alike_change_nothing(n_tokens: int, times_s: list[float]) -> None:
    assert set(learned((n_tokens, time_s) for time_s in times_s)) == {FIRST_OVERHEAD_TOKENS}


def test_hours_without_prompts_change_nothing() -> None:
    found = learned([*iterations(300, 1000), *iterations(300, 5000, sizes=(0,))])
    assert len(set(found[999:])) == 1
    after = learned(
        [*iterations(300, 1000), *iterations(300, 5000, sizes=(0,)), *iterations(300, 1000)]
    )
    assert set(after[999:]) <= {256, 512}


@given(
    st.lists(st.tuples(st.integers(0, 4096), st.floats(0.0, 1e3)), min_size=N_NEEDED, max_size=300)
)
def test_whatever_is_measured_the_overhead_is_a_power_of_two_within_bounds(
    measured: list[tuple[int, float]],
) -> None:
    for n_tokens in learned(measured):
        assert MIN_OVERHEAD_TOKENS <= n_tokens <= MAX_OVERHEAD_TOKENS
        assert n_tokens.bit_count() == 1


@given(
    overhead_tokens=st.floats(4.0, 1000.0),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**32),
)
def test_a_machine_that_stays_the_same_has_an_overhead_that_soon_does(
    overhead_tokens: float, noise: float, seed: int
) -> None:
    found = learned(iterations(overhead_tokens, 3000, noise=noise, seed=seed))
    settled = found[500:]
    n_changes = sum(left != right for left, right in pairwise(settled))
    assert n_changes <= 2
    bounded = min(max(MIN_OVERHEAD_TOKENS, overhead_tokens), MAX_OVERHEAD_TOKENS)
    assert bounded / 3 <= found[-1] <= 3 * bounded
