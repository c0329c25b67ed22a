"""Accounts on simulated time: what a key may have, whatever it asks for."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, PoolFull
from services.scheduler.core.clients import accounts
from services.scheduler.core.clients.accounts import (
    AccountLimits,
    Accounts,
    AccountUse,
    KeyInFlight,
    KeyRate,
)

PER_MINUTE = 600
IN_FLIGHT = 200
BOTH = AccountLimits(tokens_per_minute=PER_MINUTE, max_in_flight_tokens=IN_FLIGHT)


@dataclass
class Running:
    """A request in the pool."""

    n_tokens: int
    n_left: int


class World:
    """An account, its requests, and each charge with its time."""

    def __init__(self, limits: AccountLimits) -> None:
        self.account = AccountUse(limits)
        self.running: list[Running] = []
        self.charges: list[tuple[float, int]] = []
        self.now = 0.0

    def submit(self, n_prompt: int, max_new_tokens: int) -> None:
        n_tokens = n_prompt + max_new_tokens
        try:
            self.account.check(n_tokens, self.now)
        except (PoolFull, InvalidRequest):
            return
        self.account.n_tokens += n_tokens  # as the pool does
        self.running.append(Running(n_tokens, max_new_tokens))
        self._charge(n_prompt)

    def generate(self, n_tokens: int) -> None:
        """Gives each request up to so many tokens; ends those that have all."""
        for request in list(self.running):
            for _ in range(min(n_tokens, request.n_left)):
                self._charge(1)
                request.n_left -= 1
            if not request.n_left:
                self.running.remove(request)
                self.account.n_tokens -= request.n_tokens

    def _charge(self, n_tokens: int) -> None:
        self.account.charge(n_tokens, self.now)
        self.charges.append((self.now, n_tokens))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0, 200)),
        st.tuples(st.just("submit"), st.integers(1, 150), st.integers(1, 150)),
        st.tuples(st.just("generate"), st.integers(1, 100)),
    ),
    max_size=60,
)


@given(steps)
def test_in_no_time_does_a_key_get_more_than_its_limits(trace: list[tuple[str, int, int]]) -> None:
    it = World(BOTH)
    for step, *arguments in trace:
        if step == "wait":
            it.now += arguments[0]
        else:
            getattr(it, step)(*arguments)
        assert it.account.n_tokens <= IN_FLIGHT
    for first, (begin, _) in enumerate(it.charges):
        n_tokens = 0
        for end, n_charged in it.charges[first:]:
            n_tokens += n_charged
            bound = PER_MINUTE * (1 + (end - begin) / 60) + IN_FLIGHT
            assert n_tokens <= bound + 1e-6


def test_a_key_that_asks_all_the_time_gets_its_rate() -> None:
    it = World(BOTH)
    while it.now < 3600:
        it.submit(50, 50)
        it.generate(10)
        it.now += 0.5
    n_tokens = sum(n_charged for _, n_charged in it.charges)
    assert n_tokens == pytest.approx(61 * PER_MINUTE, rel=0.01)


def test_an_overdrawn_key_is_told_when_to_come_back() -> None:
    account = AccountUse(AccountLimits(tokens_per_minute=60))
    account.check(1000, 5.0)
    account.charge(90, 5.0)
    with pytest.raises(KeyRate, match="60 tokens a minute") as refusal:
        account.check(1, 5.0)
    assert refusal.value.retry_after_s == pytest.approx(30)
    with pytest.raises(KeyRate):
        account.check(1, 34.9)
    account.check(1, 35.1)


def test_requests_must_fit_beside_each_other_and_each_alone() -> None:
    account = AccountUse(AccountLimits(max_in_flight_tokens=100))
    account.check(100, 0.0)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        account.check(101, 0.0)
    account.n_tokens = 60
    account.check(40, 0.0)
    with pytest.raises(KeyInFlight) as refusal:
        account.check(41, 0.0)
    assert refusal.value.retry_after_s > 0


def test_without_limits_nothing_is_refused() -> None:
    account = AccountUse(AccountLimits())
    account.charge(10**9, 0.0)
    account.check(10**9, 0.0)
    assert account.is_idle(0.0)


def test_a_name_keeps_what_it_has_used_when_its_limits_change() -> None:
    known = Accounts()
    account = known.find("alice", AccountLimits(tokens_per_minute=60), 0.0)
    account.charge(120, 0.0)
    changed = known.find("alice", AccountLimits(tokens_per_minute=600), 0.0)
    assert changed is account
    assert changed.overdrawn_s(0.0) > 0
    assert known.find("bob", AccountLimits(tokens_per_minute=60), 0.0).overdrawn_s(0.0) == 0


@pytest.mark.parametrize("name", ["", "a" * 65], ids=["none", "long"])
def test_a_name_that_no_key_can_have_is_refused(name: str) -> None:
    known = Accounts()
    with pytest.raises(InvalidRequest):
        known.find(name, BOTH, 0.0)
    assert len(known) == 0


def test_accounts_that_are_not_used_are_forgotten() -> None:
    known = Accounts()
    busy = known.find("busy", BOTH, 0.0)
    busy.n_tokens = 1
    for number in range(10_000):
        now = 61.0 * number
        known.find(f"name-{number}", BOTH, now).charge(1, now)
        assert len(known) <= accounts.N_KEPT
    assert known.find("busy", BOTH, now) is busy


def test_there_are_never_more_accounts_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "N_KEPT", 2)
    monkeypatch.setattr(accounts, "MAX_ACCOUNTS", 5)
    known = Accounts()
    for number in range(5):
        known.find(str(number), BOTH, 0.0).charge(1, 0.0)
    with pytest.raises(PoolFull):
        known.find("5", BOTH, 0.0)
    assert len(known) == 5
    known.find("5", BOTH, 61.0)
    assert len(known) == 1
