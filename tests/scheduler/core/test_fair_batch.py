"""A client that has few requests keeps its pace beside one with many, and equal ones are free."""

from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.accounts import Account, AccountLimits
from services.scheduler.core.client import Client
from services.scheduler.core.fair_batch import FairBatch, shared_out
from services.scheduler.core.fair_order import Fair
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.core.workload import build


def clients(*weights: float) -> list[Client | None]:
    """Clients of these weights; one of 0 has no key."""
    return [Client(weight=weight) if weight else None for weight in weights]


def level_poured(
    n_tokens: int, n_wanted: dict[Client | None, int], weights: dict[Client | None, Fraction]
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
        one: max(1, int(level * weights[one]))
        for one, n in wanted.items()
        if n / weights[one] > least
    }
    assert level >= least


def scheduler(fair_tokens: int) -> Scheduler:
    return build(
        max_batch_size=8,
        n_blocks=1000,
        block_size=2,
        pipeline_depth=1,
        order=Fair(ageing_s=30.0, now=lambda: 0.0),
        policy=ChunkedPolicy(
            max_batch_size=8, max_batch_tokens=64, fair_batch=FairBatch(fair_tokens)
        ),
    )


class Clients:
    """Those who ask a scheduler, and ranks that answer with one token again and again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._accounts: dict[str, Account] = {}
        self._n = 0

    def ask(
        self, name: str, *, n: int = 1, n_prompt: int = 1, n_new: int = 30, weight: float = 1.0
    ) -> list[Request]:
        account = self._accounts.setdefault(name, Account(AccountLimits(weight=weight), name=name))
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


def test_the_first_of_who_has_many_ride_beside_who_has_few_and_all_when_it_has_ended() -> None:
    asking = Clients(scheduler(3))
    large = asking.ask("large", n=8)
    while len(asking.step()) < 8:
        pass  # they begin in groups
    (small,) = asking.ask("small", n_new=4)
    assert small in asking.step(), "it is called to the place of the last one"
    for _ in range(3):
        assert asking.step() == dict.fromkeys([*large[:2], small], 1)
    assert asking.step() == dict.fromkeys(large, 1)


def test_the_prompt_of_who_has_few_is_not_cut() -> None:
    asking = Clients(scheduler(3))
    asking.ask("large", n=4)
    asking.ask("small", n_new=9)
    for _ in range(6):
        asking.step()
    (another,) = asking.ask("small", n_prompt=20)
    assert asking.step()[another] == 20


def test_the_prompts_of_who_has_many_get_what_is_left() -> None:
    asking = Clients(scheduler(4))
    asking.ask("small", n_new=100)
    asking.step()
    first = asking.ask("large", n=2, n_new=100)
    for _ in range(3):
        asking.step()
    (another,) = asking.ask("large", n_prompt=20)
    riding = asking.step()
    assert [riding[one] for one in (*first, another)] == [1, 1, 1], "of four tokens"


def test_clients_with_equally_many_are_not_limited() -> None:
    asking = Clients(scheduler(2))
    both = [*asking.ask("one", n=3), *asking.ask("other", n=3)]
    for _ in range(5):
        riding = asking.step()
    assert riding == dict.fromkeys(both, 1)


def test_a_weight_gives_more() -> None:
    asking = Clients(scheduler(4))
    heavy = asking.ask("heavy", n=6, weight=3.0)
    (light,) = asking.ask("light")
    for _ in range(5):
        riding = asking.step()
    assert riding == dict.fromkeys([*heavy[:3], light], 1)


def test_a_client_alone_is_not_limited() -> None:
    asking = Clients(scheduler(1))
    asked = asking.ask("one", n=6)
    for _ in range(4):
        riding = asking.step()
    assert riding == dict.fromkeys(asked, 1)


def test_there_are_batches_whatever_the_limit() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        FairBatch(0)


@pytest.mark.parametrize(("policy", "order"), [("orca", "fair"), ("chunked", "fcfs")])
def test_the_setting_is_refused_where_it_would_do_nothing(
    policy: Literal["orca", "chunked"], order: Literal["fcfs", "fair"]
) -> None:
    with pytest.raises(ValueError, match="fair_batch_tokens is for the order"):
        SchedulerSettings(n_stages=1, policy=policy, order=order, fair_batch_tokens=5)
