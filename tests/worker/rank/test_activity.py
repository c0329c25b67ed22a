"""The steps of a rank's main thread, and their limits."""

import pytest

from services.common.iteration_limit import IterationLimit, IterationSize
from services.worker.rank.activity import Activity, StepTimer

WORK = IterationSize(1, 1)


@pytest.fixture(name="activity")
def make_activity() -> Activity:
    activity = Activity(IterationLimit(floor_s=6, ceiling_s=300))
    activity.computed(WORK, 0.2)
    return activity


def seconds_until_overdue(timer: StepTimer, *, at_most: int = 1000) -> int | None:
    timer.add(0)  # it sees the step
    for n_seconds in range(1, at_most):
        if timer.add(1):
            return n_seconds
    return None


def test_each_step_has_its_limit(activity: Activity) -> None:
    timer = StepTimer(activity)
    assert seconds_until_overdue(timer) is None, "loading has no limit here"
    activity.turn()
    assert seconds_until_overdue(timer) == 7
    activity.compute(5, WORK)
    assert seconds_until_overdue(timer) == 11, "6 and ten times twice 0.2"
    activity.join(3)
    assert seconds_until_overdue(timer) == 61
    activity.profile()
    assert seconds_until_overdue(timer) == 301


def test_going_on_with_a_step_is_not_beginning_it(activity: Activity) -> None:
    timer = StepTimer(activity)
    reasons = []
    for _ in range(12):
        activity.compute(5, WORK)
        reasons.append(timer.add(1))
    assert reasons[:11] == [None] * 11
    assert reasons[11] == "it hangs: it computes iteration 5 for more than 10.0 s"
    for _ in range(100):
        activity.turn()
        assert timer.add(1) is None


def test_waiting_for_others_has_a_limit_from_when_their_epoch_is_over(activity: Activity) -> None:
    timer = StepTimer(activity)
    activity.exchange(5, epoch=2)
    assert seconds_until_overdue(timer) is None
    timer.end_epochs_before(2)
    assert seconds_until_overdue(timer) is None
    timer.end_epochs_before(3)
    assert seconds_until_overdue(timer) == 7
    activity.exchange(1, epoch=3)
    assert seconds_until_overdue(timer) is None
    timer.end_epochs_before(None)
    assert seconds_until_overdue(timer) == 7


def test_without_a_limit_nothing_is_overdue() -> None:
    activity = Activity()
    timer = StepTimer(activity)
    for begin in (activity.turn, lambda: activity.compute(1, WORK), lambda: activity.join(1)):
        begin()
        assert seconds_until_overdue(timer) is None
