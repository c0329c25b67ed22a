"""Traces have the quantiles that are published of them, and arrivals the variation."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.published_traces import PUBLISHED, Marginal, PublishedTrace, bursty_arrivals
from simulator.workload import poisson_arrivals

TRACES = pytest.mark.parametrize("trace", PUBLISHED.values(), ids=PUBLISHED.keys())


@TRACES
def test_lengths_have_the_quantiles(trace: PublishedTrace) -> None:
    lengths = trace.lengths(20_000, seed=3)
    for marginal, sampled in (
        (trace.prompts, [each.n_prompt for each in lengths]),
        (trace.outputs, [each.n_output for each in lengths]),
    ):
        for part, n_tokens in marginal.quantiles:
            low, high = np.quantile(sampled, (part - 0.015, min(1.0, part + 0.015)))
            assert low <= n_tokens <= high
        assert 1 <= min(sampled) <= max(sampled) <= marginal.longest


@TRACES
def test_a_seed_says_what_is_sampled(trace: PublishedTrace) -> None:
    assert trace.lengths(50, seed=1) == trace.lengths(50, seed=1) != trace.lengths(50, seed=2)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("Azure 2023 coding", 1500, 13), ("Azure 2023 conversation", 1020, 129)],
)
def test_medians_are_those_of_splitwise(name: str, prompt: int, output: int) -> None:
    trace = PUBLISHED[name]
    assert (trace.prompts.length(0.5), trace.outputs.length(0.5)) == (prompt, output)


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_lengths_grow_with_the_part(one: float, other: float) -> None:
    marginal = Marginal(((0.5, 243), (0.8, 434), (0.95, 669)), 1000)
    low, high = sorted((one, other))
    assert 1 <= marginal.length(low) <= marginal.length(high) <= 1000


def test_between_quantiles_logarithms_are_normal() -> None:
    # The normal quantiles of 0.5 and 0.8413 are 0 and 1, that of 0.6915 is 0.5.
    marginal = Marginal(((0.5, 100), (0.841344746, 400)), 10_000)
    assert marginal.length(0.691462461) == 200
    assert marginal.length(0.158655254) == 25


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_gaps_have_their_mean_and_variation(variation: float) -> None:
    times_s = bursty_arrivals(20_000, rate=4.0, variation=variation, seed=0)
    gaps_s = np.diff(times_s)
    assert statistics.mean(gaps_s) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps_s) == pytest.approx(0.25 * variation, rel=0.08)
    assert times_s[0] == 0.0


def test_a_variation_of_one_is_the_poisson_process_of_the_workload() -> None:
    assert bursty_arrivals(9, rate=2.0, variation=1.0, seed=5) == poisson_arrivals(
        9, rate=2.0, seed=5
    )
