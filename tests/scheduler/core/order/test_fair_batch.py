"""A client that has few requests keeps its pace beside one with many, and equal ones are free."""

from collections import Counter
from fractions import Fraction
from math import ceil
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fair_batch import FairBatch, shared_out
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.core.workload import build


def clients(*weights: float) -> list[ServedClient | None]:
    """Clients of these weights; one of 0 has no key."""
    return [ServedClient(weight=weight) if weight else None for weight in weights]


def level_poured(
    n_tokens: int,
    n_wanted: dict[ServedClient | None, int],
    weights: dict[ServedClient | None, Fraction],
) -> Fraction:
    """The tokens by weight to which all rise together, if they are poured out until each but the
    last has what it wants: the slow obvious version."""
    least = min(n_wanted[one] / weights[one] for one in n_wanted)
    left = max(Fraction(n_tokens), least * sum(weights.values()))
    level, thirsty = Fraction(0), set(n_wanted)
    while left:
        nearly_full = [one for one in thirsty if n_wanted[one] / weights[one] > level]
        thirsty = set(nearly_full or thirsty)
        weight = sum(weights[one] for one in thirsty)
        rise = left / weight
        if len(thirsty) > 1 and nearly_full:
            rise = min(rise, min(n_wanted[one] / weights[one] for one in thirsty) - level)
        level += rise
        left -= rise * weight
    return level


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 4.0])),
        min_size=1,
        max_size=6,
    ).filter(lambda each: sum(weight == 0 for _, weight in each) < 2),
    st.integers(1, 30),
)
def test_tokens_are_shared_out_as_if_they_were_poured(
    each: list[tuple[int, float]], n_tokens: int
) -> None:
    all_of_them = clients(*(weight for _, weight in each))
    wanted = {one: n for one, (n, _) in zip(all_of_them, each, strict=True)}
    weights = {one: Fraction(1 if one is None else one.weight) for one in wanted}
    level = level_poured(n_tokens, wanted, weights)
    least = min(n / weights[one] for one, n in wanted.items())
    assert shared_out(n_tokens, wanted) == {
        one: ceil(level * weights[one]) for one, n in wanted.items() if n / weights[one] > least
    }
    assert level >= least


def asking(n_tokens: int | None, *, n_places: int = 8) -> "Clients":
    batch = None if n_tokens is None else FairBatch(n_tokens)
    return Clients(
        build(
            max_batch_size=n_places,
            n_blocks=40_000,
            block_size=2,
            pipeline_depth=1,
            order=Fair(ageing_s=30.0, now=lambda: 0.0, batch=batch),
            policy=ChunkedPolicy(max_batch_size=n_places, max_batch_tokens=64),
        )
    )


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_clients_with_equally_many_by_weight_are_not_limited(n: int, weight: int, k: int) -> None:
    one, other = clients(weight / 10, k * weight / 10)
    wanted = {one: n, other: k * n}
    assert not shared_out(1, wanted)


class Clients:
    """Those who ask a scheduler, and ranks that answer with one token again and again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._accounts: dict[str, AccountUse] = {}
        self._n = 0

    def ask(
        self, name: str, *, n: int = 1, n_prompt: int = 1, n_new: int = 1000, weight: float = 1.0
    ) -> list[Request]:
        account = self._accounts.setdefault(
            name, AccountUse(AccountLimits(weight=weight), name=name)
        )
        asked = []
        for _ in range(n):
            self._n += 1
            asked.append(Request(RequestId(str(self._n)), [1] * n_prompt, n_new, account=account))
            self.scheduler.submit(asked[-1])
        return asked

    def step(self) -> dict[Request, int]:
        """Runs a batch; returns who rode, with how many tokens."""
        batch = self.scheduler.select()
        assert batch is not None
        self.scheduler.apply(batch.iteration, [5 for span in batch.spans if span.is_sampled])
        return {span.request: span.n_tokens for span in batch.spans}

    def steps(self, n: int) -> Counter[Request]:
        """Runs batches; returns how often each request rode."""
        return Counter(request for _ in range(n) for request in self.step())

    def begin(self, *requests: Request, within: int = 100) -> None:
        """Runs batches until these have begun."""
        for _ in range(within):
            if all(request.generated_token_ids for request in requests):
                return
            self.step()
        raise AssertionError("they do not begin")


def test_who_has_few_rides_always_and_those_of_who_has_many_take_turns() -> None:
    clients = asking(3)
    large = clients.ask("large", n=8)
    clients.begin(*large)
    (small,) = clients.ask("small", n_new=41)
    assert small in clients.step(), "it is called to the place of the last one"
    rides = clients.steps(40)
    assert rides[small] == 40
    assert [rides[one] for one in large] == [10] * 8
    assert clients.step() == dict.fromkeys(large, 1), "it is alone again"


def test_the_prompt_of_who_has_few_is_not_cut() -> None:
    clients = asking(3)
    large = clients.ask("large", n=4)
    clients.begin(*large)
    (small,) = clients.ask("small")
    clients.begin(small)
    (another,) = clients.ask("small", n_prompt=20)
    assert clients.step()[another] == 20


def test_the_prompts_of_who_has_many_get_what_is_left() -> None:
    clients = asking(6)
    (small,) = clients.ask("small")
    clients.begin(small)
    large = clients.ask("large", n=2)
    clients.begin(*large)
    (another,) = clients.ask("large", n_prompt=20)
    for n in [3] * 6 + [2]:
        riding = clients.step()
        assert [riding[one] for one in (small, *large, another)] == [1, 1, 1, n]
    assert another.generated_token_ids


def test_who_has_no_tokens_left_holds_up_nobody_else() -> None:
    clients = asking(3, n_places=16)
    (small,) = clients.ask("small")
    clients.begin(small)
    clients.begin(*clients.ask("large", n=4))
    waiting = clients.ask("large", n=200)
    (third,) = clients.ask("third")
    assert third.client is not None
    third.client.served += 3000  # so its turn comes after those of all others
    clients.begin(third, within=2)
    assert not any(one.generated_token_ids for one in waiting)


def test_a_call_is_for_who_may_ride() -> None:
    clients = asking(4)
    many = clients.ask("many", n=5)
    clients.begin(*many)
    clients.begin(*clients.ask("first", n=2))
    (small,) = clients.ask("small")
    clients.begin(small)
    waiting = clients.ask("first", n=2)
    (second,) = clients.ask("second")
    for request, n_more in ((second, 1000), (many[0], 2000)):
        assert request.client is not None
        request.client.served += n_more  # so `second` has its turn after those of `first`
    clients.begin(second, within=5)
    assert clients.steps(20)[small] == 20
    assert not any(one.generated_token_ids for one in waiting)


def test_after_a_loss_nobody_is_limited_until_it_is_known_whose_it_was() -> None:
    clients = asking(2)
    on_board = [*clients.ask("small"), *clients.ask("large", n=6)]
    batch = clients.scheduler.select()
    assert batch is not None
    assert len(batch.spans) == len(on_board)
    clients.scheduler.suspend()
    clients.scheduler = Scheduler(
        clients.scheduler.pool,
        KVManager(n_blocks=40_000, block_size=2),
        policy=clients.scheduler.policy,
        pipeline_depth=1,
    )
    (third,) = clients.ask("third")
    clients.begin(third)


def test_no_more_run_than_without_a_limit() -> None:
    coming = (("b", 1, 0), ("a", 11, 18), ("b", 12, 11), ("b", 1, 8), ("b", 4, 99))
    n_running = []
    for n_tokens in (2, None):
        clients = asking(n_tokens, n_places=16)
        for name, n, n_steps in coming:
            clients.ask(name, n=n)
            clients.steps(n_steps)
        n_running.append(len(clients.scheduler.pool.running))
    limited, unlimited = n_running
    assert 16 <= limited <= unlimited


def test_who_has_few_begins_at_once_where_all_places_are_taken() -> None:
    clients = asking(4, n_places=16)
    clients.begin(*clients.ask("large", n=16))
    small = clients.ask("small", n=4, n_prompt=60)
    clients.begin(*small, within=7)


@pytest.mark.parametrize(
    "n_tokens", [2, None, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 6))]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abbcd"), st.integers(0, 25), st.sampled_from([1, 1, 1, 1, 5000])
        ),
        min_size=8,
        max_size=30,
    ),
)
def test_no_request_waits_for_the_end_of_another_one(
    n_tokens: int | None, coming: list[tuple[str, int, int]]
) -> None:
    """Whoever has begun gets a token within as many batches as there are requests; without a limit
    only those who have swapped places wait for an end, and as many run."""
    clients = asking(n_tokens)
    since: dict[Request, int] = {}
    turn = 0
    for name, n_steps, n_prompt in coming:
        since[clients.ask(name, n_prompt=n_prompt)[0]] = 10_000
        for _ in range(n_steps):
            turn += 1
            since.update(dict.fromkeys(clients.step(), turn))
    for _ in range(100):
        turn += 1
        since.update(dict.fromkeys(clients.step(), turn))
    running = clients.scheduler.pool.running
    n_swapped = len(running) - 8
    begun = [one for one in running if one.generated_token_ids]
    assert sum(turn - since[one] > len(coming) for one in begun) <= max(0, n_swapped)


def test_a_stream_goes_on_behind_a_long_prompt_that_is_not_limited_any_more() -> None:
    clients = asking(4)
    (first,) = clients.ask("a")
    clients.begin(first)
    (second,) = clients.ask("b")
    clients.begin(second)
    (long,) = clients.ask("a", n_prompt=6000)
    clients.step()
    assert clients.step()[long] == 2
    (stream,) = clients.ask("b")
    clients.begin(stream, within=2)
    for _ in range(20):
        assert clients.step() == {first: 1, second: 1, stream: 1, long: 61}, "both have two"


def test_who_is_called_to_a_place_behind_a_long_prompt_begins_at_once() -> None:
    clients = asking(4)
    clients.begin(*clients.ask("a"))
    clients.begin(*clients.ask("b", n_new=5))
    (long,) = clients.ask("a", n_prompt=6000)
    clients.step()
    for _ in range(2):
        clients.begin(*clients.ask("b"), within=10)
    clients.steps(5)
    (small,) = clients.ask("small", n_new=20)
    assert small.client is not None
    assert long.client is not None
    assert small.client.served > long.client.served, "so it can have a place of b alone"
    assert small in clients.step()
    assert clients.steps(19)[small] == 19
    assert not long.generated_token_ids


def test_clients_with_equally_many_are_not_limited() -> None:
    clients = asking(2)
    both = [*clients.ask("one", n=3), *clients.ask("other", n=3)]
    clients.begin(*both)
    assert clients.step() == dict.fromkeys(both, 1)


def test_a_weight_gives_more() -> None:
    clients = asking(4)
    heavy = clients.ask("heavy", n=6, weight=3.0)
    clients.begin(*heavy)
    (light,) = clients.ask("light")
    clients.begin(light)
    rides = clients.steps(10)
    assert rides[light] == 10
    assert sum(rides[one] for one in heavy) == 30


def test_a_client_alone_is_not_limited() -> None:
    clients = asking(1)
    asked = clients.ask("one", n=6)
    clients.begin(*asked)
    assert clients.step() == dict.fromkeys(asked, 1)


def test_a_limit_leaves_something() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        FairBatch(0)


@pytest.mark.parametrize(("policy", "order"), [("orca", "fair"), ("chunked", "fcfs")])
def test_the_setting_is_refused_where_it_would_do_nothing(
    policy: Literal["orca", "chunked"], order: Literal["fcfs", "fair"]
) -> None:
    with pytest.raises(ValueError, match="fair_batch_tokens is for the order"):
        SchedulerSettings(n_stages=1, policy=policy, order=order, fair_batch_tokens=5)
