"""When stages began, by durations alone."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.watching.stage_starts import StageStarts, StageTime

MS = 1_000_000
TIMES = st.lists(st.tuples(st.integers(0, 5 * MS), st.integers(0, MS)), min_size=3, max_size=3).map(
    lambda pairs: [StageTime(*pair) for pair in pairs]
)


def test_stages_begin_one_after_the_other() -> None:
    starts = StageStarts(2).starts(7 * MS, 10 * MS, [StageTime(3 * MS, MS), StageTime(4 * MS, 0)])
    assert starts == [0, 4 * MS]


def test_a_stage_waits_until_it_is_done_with_the_iteration_before() -> None:
    stages = StageStarts(2)
    times = [StageTime(3 * MS, MS), StageTime(5 * MS, 0)]
    stages.starts(0, 9 * MS, times)
    assert stages.starts(MS, 13 * MS, times) == [2 * MS, 8 * MS]


def test_what_came_before_the_result_began_in_time_for_it() -> None:
    stages = StageStarts(1)
    stages.starts(0, 10 * MS, [StageTime(10 * MS, 0)])
    assert stages.starts(5 * MS, 6 * MS, [StageTime(3 * MS, 0)]) == [3 * MS]


@given(st.lists(st.tuples(TIMES, st.integers(0, 4 * MS), st.integers(0, 30 * MS)), max_size=9))
def test_starts_are_in_order_and_within_the_round_trip(
    iterations: list[tuple[list[StageTime], int, int]],
) -> None:
    stages, sent_ns = StageStarts(3), 0
    for times, pause_ns, round_trip_ns in iterations:
        sent_ns += pause_ns
        starts = stages.starts(sent_ns, round_trip_ns, times)
        assert all(0 <= start_ns <= round_trip_ns for start_ns in starts)
        assert all(before <= after for before, after in pairwise(starts))
