"""The growth of a process's memory is what comes after the warm-up."""

import pytest

from benchmarks.serving.soak import growth


def test_growth_in_the_warm_up_does_not_count() -> None:
    samples = [(2.0 * index, 100 if index < 20 else 200) for index in range(100)]
    part, per_hour = growth(samples)
    assert part == 0.0
    assert per_hour == pytest.approx(0.0, abs=1e-6)


def test_growth_is_a_part_and_the_slope_is_by_the_hour() -> None:
    part, per_hour = growth([(36.0 * index, 1000 + index) for index in range(101)])
    assert part == pytest.approx(73 / 1023.5, rel=0.02)
    assert per_hour == pytest.approx(100.0)
