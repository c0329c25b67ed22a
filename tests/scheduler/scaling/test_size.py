"""The rule for the number of pipelines, as a function of loads and times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.scaling.load import Load
from services.scheduler.scaling.size import Size, SizeLimits, resize

LIMITS = SizeLimits(
    min_pipelines=1,
    max_pipelines=4,
    queue_goal_s=10.0,
    scale_down_after_s=60.0,
    sleep_after_s=100.0,
)
MAY_SLEEP = replace(LIMITS, min_pipelines=0)
IDLE = Load(n_serving=1)
BUSY = Load(n_serving=1, n_running=8, used=0.5)


def queue(seconds: float, *, n_serving: int = 1) -> Load:
    """A load with so long a queue."""
    return Load(
        n_serving=n_serving, n_waiting=9, n_queued_tokens=900, queue_s=seconds, n_running=8, used=1
    )


def size(n_pipelines: int, *, at: float = 0.0) -> Size:
    return Size(n_pipelines=n_pipelines, changed_at=at)


def looks(before: Size, load: Load, limits: SizeLimits, *times: float) -> list[int]:
    """The numbers of pipelines after looks at one load."""
    found = []
    for time in times:
        before = resize(before, load, limits, time)
        found.append(before.n_pipelines)
    return found


def test_as_many_pipelines_are_added_as_work_off_the_queue_within_the_goal() -> None:
    after = resize(size(1), queue(25.0), LIMITS, 1.0)
    assert after.n_pipelines == 3
    assert after.reason == (
        "9 requests with 900 tokens wait, and the last would begin in 25.0 s, "
        "which is more than 10 s"
    )
    assert resize(size(1), queue(10.0), LIMITS, 1.0).n_pipelines == 1
    assert resize(size(1), queue(1e9), LIMITS, 1.0).n_pipelines == 4


def test_no_more_are_added_while_earlier_ones_start() -> None:
    starting = resize(size(1), queue(25.0), LIMITS, 1.0)
    assert resize(starting, queue(40.0), LIMITS, 2.0).n_pipelines == 3
    assert resize(starting, queue(40.0, n_serving=3), LIMITS, 2.0).n_pipelines == 4


def test_pipelines_are_removed_when_fewer_were_enough_for_the_whole_time() -> None:
    assert looks(size(3), BUSY, LIMITS, 1.0, 60.0, 61.0) == [3, 3, 1]
    quiet = resize(size(3), BUSY, LIMITS, 1.0)
    disturbed = resize(quiet, queue(12.0, n_serving=3), LIMITS, 30.0)
    assert looks(disturbed, BUSY, LIMITS, 61.0, 120.0, 121.0) == [4, 4, 1]


def test_the_largest_number_that_was_needed_meanwhile_stays() -> None:
    it = resize(size(4), replace(BUSY, used=1.5), LIMITS, 1.0)
    it = resize(it, BUSY, LIMITS, 30.0)
    assert resize(it, BUSY, LIMITS, 61.0).n_pipelines == 3


def test_a_load_that_only_just_fits_keeps_its_pipelines() -> None:
    assert looks(size(2), replace(BUSY, used=0.8), LIMITS, 1.0, 1000.0) == [2, 2]
    assert looks(size(2), queue(6.0, n_serving=2), LIMITS, 1.0, 1000.0) == [2, 2]


def test_an_idle_model_sleeps_if_it_may() -> None:
    assert looks(size(2), IDLE, LIMITS, 1.0, 61.0, 500.0) == [2, 1, 1]
    assert looks(size(1), IDLE, MAY_SLEEP, 1.0, 100.0, 101.0, 500.0) == [1, 1, 0, 0]
    unknown = replace(IDLE, is_known=False)
    assert looks(size(1), unknown, MAY_SLEEP, 1.0, 500.0) == [1, 1]


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (Load(n_held=2), "2 requests wait for a model that is asleep"),
        (Load(n_waiting=1), "1 requests wait for a model that is asleep"),
        (Load(is_known=False), "no pipeline has served yet, so frontends do not know the model"),
    ],
    ids=["held", "waiting", "unknown"],
)
def test_a_model_that_is_asleep_wakes_at_once(load: Load, reason: str) -> None:
    asleep = resize(size(1), replace(IDLE, n_serving=0), MAY_SLEEP, 0.0)
    asleep = resize(asleep, replace(IDLE, n_serving=0), MAY_SLEEP, 100.0)
    assert asleep.n_pipelines == 0
    after = resize(asleep, load, MAY_SLEEP, 100.1)
    assert (after.n_pipelines, after.reason) == (1, reason)


LOADS = st.builds(
    Load,
    n_serving=st.integers(0, 6),
    n_waiting=st.integers(0, 3),
    n_queued_tokens=st.just(100.0),
    queue_s=st.sampled_from([0.0, 0.1, 4.0, 6.0, 11.0, 30.0, 1e6]),
    n_running=st.integers(0, 3),
    used=st.floats(0, 6),
    n_held=st.integers(0, 2),
    is_known=st.booleans(),
)


@given(
    history=st.lists(st.tuples(LOADS, st.floats(0.1, 80)), max_size=30),
    least=st.integers(0, 4),
    first=st.integers(0, 4),
)
def test_the_number_is_within_its_limits_and_falls_only_some_time_after_it_changed(
    history: list[tuple[Load, float]], least: int, first: int
) -> None:
    limits = replace(LIMITS, min_pipelines=least)
    now, changed_at, it = 0.0, 0.0, size(limits.clamp(first))
    for load, passed_s in history:
        now += passed_s
        before, it = it, resize(it, load, limits, now)
        assert least <= it.n_pipelines <= 4
        if it.n_pipelines < before.n_pipelines:
            assert now - changed_at >= min(limits.scale_down_after_s, limits.sleep_after_s)
        if it.n_pipelines != before.n_pipelines:
            assert it.reason
            changed_at = now
        if not load.is_idle:
            assert it.n_pipelines >= 1


@given(
    history=st.lists(st.tuples(LOADS, st.floats(0.1, 80)), max_size=10),
    load=LOADS,
    more_s=st.floats(0, 100),
)
def test_a_longer_queue_never_leads_to_fewer_pipelines(
    history: list[tuple[Load, float]], load: Load, more_s: float
) -> None:
    now, it = 0.0, size(1)
    for past, passed_s in history:
        now += passed_s
        it = resize(it, past, MAY_SLEEP, now)
    longer = replace(load, queue_s=load.queue_s + more_s)
    now += 61.0
    assert (
        resize(it, longer, MAY_SLEEP, now).n_pipelines
        >= resize(it, load, MAY_SLEEP, now).n_pipelines
    )
