"""The gate in front of a full pool, against a pool and the two streams between them."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.link.pool_gate import PoolGate
from services.frontend.request.refusals import Refusal, Refusals


def says(n_free: int) -> scheduler_pb2.ConnectResponse:
    return scheduler_pb2.ConnectResponse(n_free=n_free)


def is_let_in(gate: PoolGate, now: float = 0.0) -> bool:
    try:
        gate.check(now=now)
    except errors.PoolFull:
        return False
    return True


def test_all_are_let_in_while_nothing_is_known() -> None:
    gate = PoolGate(Refusals())
    assert all(is_let_in(gate) for _ in range(100))


def test_refusal_says_when_to_try_again_and_is_counted() -> None:
    refusals = Refusals()
    gate = PoolGate(refusals)
    gate.update(says(0), now=0.0)
    with pytest.raises(errors.PoolFull) as refused:
        gate.check(now=0.0)
    assert refused.value.retry_after_s > 0
    assert refusals[Refusal.IN_FLIGHT] == 1


def test_submissions_that_are_not_answered_have_places() -> None:
    gate = PoolGate(Refusals())
    gate.update(says(2), now=0.0)
    gate.note_sent()
    assert is_let_in(gate)
    gate.note_sent()
    assert not is_let_in(gate)
    gate.update(scheduler_pb2.ConnectResponse(rejected=[scheduler_pb2.Rejection()]), now=0.0)
    assert is_let_in(gate)


def test_word_of_places_is_believed_for_a_second() -> None:
    gate = PoolGate(Refusals())
    gate.update(says(0), now=0.0)
    assert not is_let_in(gate, 0.99)
    assert is_let_in(gate, 1.0)


def test_message_that_says_nothing_of_places_changes_nothing() -> None:
    gate = PoolGate(Refusals())
    gate.update(says(0), now=0.0)
    gate.update(scheduler_pb2.ConnectResponse(), now=0.0)
    assert not is_let_in(gate)


def test_another_stream_is_another_scheduler() -> None:
    gate = PoolGate(Refusals())
    gate.update(says(1), now=0.0)
    gate.note_sent()
    gate.reset()
    assert is_let_in(gate)
    gate.update(says(1), now=0.0)
    assert is_let_in(gate)  # no call waits for an answer that will not come


def is_in_time(gate: PoolGate, account: str = "a", priority: int = 0, *, now: float) -> bool:
    try:
        gate.check_time(account, priority, now=now)
    except errors.PoolFull:
        return False
    return True


def test_who_would_be_too_late_is_refused_for_as_long_as_that_holds() -> None:
    refusals = Refusals()
    gate = PoolGate(refusals)
    gate.note_late("a", 0, 0.5, now=10.0)
    with pytest.raises(errors.PoolFull) as refused:
        gate.check_time("a", 0, now=10.2)
    assert refused.value.retry_after_s == pytest.approx(0.3)
    assert not is_in_time(gate, priority=1, now=10.2)
    assert refusals[Refusal.TOO_LATE] == 2
    assert is_in_time(gate, now=10.5)


def test_others_and_more_important_ones_are_not_refused_for_it() -> None:
    gate = PoolGate(Refusals())
    gate.note_late("a", 0, 0.5, now=10.0)
    assert is_in_time(gate, "b", now=10.2)
    assert is_in_time(gate, priority=-1, now=10.2)


def test_what_holds_for_long_is_asked_again_after_a_second() -> None:
    gate = PoolGate(Refusals())
    gate.note_late("a", 0, 60.0, now=10.0)
    with pytest.raises(errors.PoolFull) as refused:
        gate.check_time("a", 0, now=10.5)
    assert refused.value.retry_after_s == pytest.approx(59.5)
    assert is_in_time(gate, now=11.0)


def test_word_of_a_less_important_one_does_not_hide_that_of_a_more_important_one() -> None:
    gate = PoolGate(Refusals())
    gate.note_late("a", 0, 0.5, now=10.0)
    gate.note_late("a", 5, 0.9, now=10.1)
    assert not is_in_time(gate, now=10.2)


class OneFrontend(RuleBasedStateMachine):
    """A frontend, a pool that only it uses, and messages on their way in both directions."""

    @initialize(n_places=st.integers(1, 4))
    def begin(self, n_places: int) -> None:
        self.gate = PoolGate(Refusals())
        self.n_free = n_places
        self.n_running = 0
        self.n_going_up = 0
        self.coming_down: deque[scheduler_pb2.ConnectResponse] = deque()
        self.news = scheduler_pb2.ConnectResponse()
        self.n_rejected = 0
        self.say()

    def say(self) -> None:
        self.news.n_free = self.n_free
        self.coming_down.append(self.news)
        self.news = scheduler_pb2.ConnectResponse()

    @precondition(lambda self: self.gate._n_free is not None)
    @rule()
    def call(self) -> None:
        """A call submits its request as soon as it is let in."""
        if is_let_in(self.gate):
            self.n_going_up += 1
            self.gate.note_sent()

    @precondition(lambda self: self.n_going_up)
    @rule()
    def arrive(self) -> None:
        self.n_going_up -= 1
        if self.n_free:
            self.n_free -= 1
            self.n_running += 1
            self.news.accepted.add()
        else:
            self.n_rejected += 1
            self.news.rejected.add()
        self.say()

    @precondition(lambda self: self.n_running)
    @rule()
    def finish(self) -> None:
        self.n_running -= 1
        self.n_free += 1
        self.news.completed.add()
        self.say()

    @precondition(lambda self: self.coming_down)
    @rule()
    def hear(self) -> None:
        self.gate.update(self.coming_down.popleft(), now=0.0)

    @rule()
    def rest(self) -> None:
        """All answers come: the gate must know the pool exactly."""
        while self.n_going_up:
            self.arrive()
        while self.coming_down:
            self.hear()
        assert is_let_in(self.gate) == (self.n_free > 0)

    @invariant()
    def nobody_was_let_in_for_nothing(self) -> None:
        assert getattr(self, "n_rejected", 0) == 0


TestOneFrontend = OneFrontend.TestCase
TestOneFrontend.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
