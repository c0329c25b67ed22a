"""Each rule of a selection is noticed when it is broken, and only then."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.policies import (
    MemoryView,
    Policy,
    PolicyOptions,
    PoolView,
    Selection,
)
from services.scheduler.core.policies.checked import BrokenRule, CheckedPolicy
from services.scheduler.core.request import Request
from tests.scheduler.core.workload import Arrival, Driver, build

Select = Callable[[PoolView, MemoryView], list[Selection]]


class Scripted(Policy):
    """A policy that selects by a function."""

    name = "scripted"

    def __init__(self, options: PolicyOptions, select: Select) -> None:
        super().__init__(options)
        self._select = select
        self.max_span_tokens, self.max_tokens = 4, 8

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        return self._select(pool, kv_manager)


def chosen(request: Request, memory: MemoryView, n_tokens: int = 1) -> Selection:
    reservation = request.reservation or memory.reserve(request)
    assert reservation is not None
    return Selection(request, n_tokens, reservation)


def all_of(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [chosen(request, memory) for request in pool.candidates()]


def twice(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [all_of(pool, memory)[0]] * 2


def too_long(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [chosen(next(pool.candidates()), memory, 5)]


def cut(pool: PoolView, memory: MemoryView) -> list[Selection]:
    request = next(pool.candidates())
    request.runs_whole = True
    return [chosen(request, memory, 2)]


def empty(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [chosen(next(pool.candidates()), memory, 0)]


def many_tokens(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [chosen(request, memory, 3) for request in pool.candidates()]


def second(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [chosen(list(pool.candidates())[1], memory)]


def reserved_for_later(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return all_of(pool, memory)[:1]


def reserved_twice(pool: PoolView, memory: MemoryView) -> list[Selection]:
    request = next(pool.candidates())
    memory.reserve(request)
    return [chosen(request, memory)]


def of_another(pool: PoolView, memory: MemoryView) -> list[Selection]:
    one, two, _ = all_of(pool, memory)
    return [one, two._replace(reservation=one.reservation)]


def changed(pool: PoolView, memory: MemoryView) -> list[Selection]:
    request = next(pool.candidates())
    request.priority = 5
    return [chosen(request, memory)]


def skips_the_prompt(pool: PoolView, memory: MemoryView) -> list[Selection]:
    request = next(pool.candidates())
    selection = chosen(request, memory)
    request.n_scheduled = request.n_cached_tokens = request.n_tokens - 1
    return [selection]


def another_prompt(pool: PoolView, memory: MemoryView) -> list[Selection]:
    request = next(pool.candidates())
    request.prompt_token_ids = [9] * request.n_prompt_tokens
    return [chosen(request, memory)]


def a_fraction(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return [chosen(next(pool.candidates()), memory, 1.5)]  # type: ignore[arg-type]


def no_list(pool: PoolView, memory: MemoryView) -> list[Selection]:
    return iter(all_of(pool, memory))  # type: ignore[return-value]


def offered_before(pool: PoolView, memory: MemoryView) -> list[Selection]:
    request = next(iter(pool._pool.candidates()))  # type: ignore[attr-defined]
    return [chosen(request, memory)]


def system(select: Select, *, max_batch_size: int = 3, order: Order | None = None) -> Driver:
    scheduler = build(
        max_batch_size=max_batch_size,
        n_blocks=60,
        block_size=1,
        pipeline_depth=1,
        policy=CheckedPolicy(Scripted(PolicyOptions(max_batch_size), select)),
        order=order,
    )
    driver = Driver(scheduler, [Arrival(0, 6, 2, 2)] * 3)
    driver.arrive()
    return driver


@pytest.mark.parametrize(
    ("select", "rule"),
    [
        (twice, "request 0 is selected twice"),
        (too_long, "request 0 is selected with 5 tokens, and max_span_tokens is 4"),
        (cut, "request 0 is selected with 2 of 6 tokens, and runs whole"),
        (empty, "request 0 is selected with 0 tokens, and has 6"),
        (many_tokens, "9 tokens are selected, and its limit is 8 tokens"),
        (second, "order: request 0 waits, and requests behind it are admitted"),
        (reserved_for_later, "memory is reserved and not used for request 1, 2"),
        (reserved_twice, "memory is reserved twice for request 0"),
        (of_another, "request 1 waits, and its reservation was not made in this selection"),
        (changed, "request 0 is changed: priority"),
        (skips_the_prompt, "request 0 is changed: n_scheduled"),
        (another_prompt, "request 0 is changed: prompt"),
        (a_fraction, "request 0 is selected with 1.5 tokens, which is no whole number"),
        (no_list, "select must return a list of selections"),
        (offered_before, "request 0 is selected, and the pool did not offer it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_rule_is_named_with_the_policy(select: Select, rule: str) -> None:
    with pytest.raises(BrokenRule, match=f"^policy scripted: {rule}"):
        system(select).select()


def test_a_batch_that_is_too_large_is_noticed() -> None:
    with pytest.raises(BrokenRule, match="3 requests are selected, and max_batch_size is 2"):
        system(all_of, max_batch_size=2).select()


def test_a_running_request_keeps_its_reservation() -> None:
    def other(pool: PoolView, memory: MemoryView) -> list[Selection]:
        found = all_of(pool, memory)
        return [one._replace(reservation=found[0].reservation) for one in found]

    driver = system(all_of)
    driver.select()
    driver.return_oldest()
    assert isinstance(driver.scheduler.policy, CheckedPolicy)
    driver.scheduler.policy.policy = Scripted(PolicyOptions(3), other)
    with pytest.raises(BrokenRule, match="request 1 runs, and is selected with another reserv"):
        driver.select()


@pytest.mark.parametrize("has_ended", [False, True])
def test_an_order_that_offers_a_request_after_its_turn_is_noticed(has_ended: bool) -> None:
    class Forgetful(FirstComeFirstServed):
        def line_up(
            self, ready: Sequence[Request], waiting: Sequence[Request] | None = None
        ) -> Iterator[Request]:
            return iter([*ready, *self, *([] if has_ended else self)])

        def remove(self, request: Request) -> None:
            if not has_ended:
                super().remove(request)

    driver = system(all_of, order=Forgetful())
    driver.scheduler.cancel(driver.requests[0])
    late = "0" if has_ended else "1"
    with pytest.raises(BrokenRule, match=f"the order offers request {late} after its turn"):
        driver.select()


def test_a_policy_that_keeps_the_rules_is_left_alone() -> None:
    driver = system(all_of)
    while not driver.is_done:
        driver.arrive()
        if driver.select() is None or driver.in_flight:
            driver.return_oldest()
    assert all(len(one.generated_token_ids) == 2 for one in driver.requests.values())
