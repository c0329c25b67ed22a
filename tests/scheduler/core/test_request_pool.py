"""The pool's limits, in requests and in tokens."""

from array import array

import pytest
from hypothesis import given
from pydantic import ValidationError

from services.common.errors import InvalidRequest, PoolFull
from services.scheduler.core.admission.pool_tokens import OPTION_BYTES, SMALL_OPTIONS_BYTES
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.core.workload import Arrival, Driver, arrivals, build


def request_of(n_prompt: int, max_new_tokens: int, account: AccountUse | None = None) -> Request:
    return Request(RequestId("r"), [1] * n_prompt, max_new_tokens, account=account)


def test_a_pool_is_full_when_its_requests_may_come_to_too_many_tokens() -> None:
    pool = RequestPool(max_requests=100, max_tokens=20)
    first = request_of(8, 4)
    pool.add(first)
    with pytest.raises(PoolFull, match="limit of 20") as refusal:
        pool.add(request_of(5, 4))
    assert refusal.value.retry_after_s > 0
    pool.add(request_of(4, 4))
    assert pool.shared.n_tokens == 20
    pool.remove(first)
    pool.add(request_of(5, 4))


def test_a_request_that_could_not_even_be_there_alone_is_invalid() -> None:
    scheduler = build(max_batch_size=1, n_blocks=100, block_size=4, pipeline_depth=1)
    scheduler.pool.max_tokens = 20
    with pytest.raises(InvalidRequest, match="the 20 that all requests may have"):
        scheduler.submit(request_of(17, 4))
    scheduler.submit(request_of(16, 4))


def test_options_that_leave_no_room_in_an_empty_pool_are_invalid_and_not_to_be_sent_again() -> None:
    scheduler = build(max_batch_size=1, n_blocks=100, block_size=4, pipeline_depth=1)
    scheduler.pool.max_tokens = 1000
    large = request_of(8, 4)
    large.sampling = bytes(SMALL_OPTIONS_BYTES + OPTION_BYTES * 988)
    scheduler.submit(large)
    scheduler.cancel(large)
    larger = request_of(9, 4)
    larger.sampling = large.sampling
    with pytest.raises(InvalidRequest, match="8048 bytes of options exceed the 1000"):
        scheduler.submit(larger)


@given(arrivals(with_cancellations=True))
def test_the_pool_and_its_accounts_count_the_tokens_of_the_requests_in_it(
    to_come: list[Arrival],
) -> None:
    account = AccountUse(AccountLimits())
    scheduler = build(max_batch_size=3, n_blocks=16, block_size=4, pipeline_depth=2)
    driver = Driver(scheduler, to_come, account=account)
    while not driver.is_done:
        driver.arrive()
        driver.select()
        if driver.in_flight:
            driver.return_oldest()
        n_tokens = sum(request.max_sequence_len for request in scheduler.pool)
        assert (scheduler.pool.shared.n_tokens, account.n_tokens) == (n_tokens, n_tokens)
    assert account.n_tokens == 0


def test_a_flood_of_the_longest_prompts_stops_at_the_memory_that_it_may_have() -> None:
    limits = SchedulerSettings(n_stages=1)
    pool = RequestPool(max_requests=limits.max_requests, max_tokens=limits.max_pool_tokens)
    prompt = array(TOKEN_ID, [1]) * 131_071
    n_taken = 0
    for _ in range(32 * 128):
        try:
            pool.add(Request(RequestId("r"), prompt, 1))
        except PoolFull:
            continue
        n_taken += 1
    assert 0 < n_taken * len(prompt) * prompt.itemsize <= 4 * limits.max_pool_tokens
    assert n_taken == limits.max_pool_tokens // 131_072


def test_a_pool_has_no_more_requests_than_ranks_have_rows() -> None:
    assert SchedulerSettings(n_stages=1, max_requests=32_768).max_requests == 32_768
    with pytest.raises(ValidationError, match="max_requests"):
        SchedulerSettings(n_stages=1, max_requests=32_769)


def test_a_long_grammar_counts_as_tokens_until_its_request_ends() -> None:
    pool = RequestPool(max_requests=4, max_tokens=10_000)
    grammar = Request(RequestId("grammar"), [1] * 10, 10, sampling=b"x" * (4096 + 4 * 9000))
    pool.add(grammar)
    assert pool.shared.n_tokens == 9020
    with pytest.raises(PoolFull, match="9020 tokens"):
        pool.add(Request(RequestId("next"), [1] * 10, 1000))
    pool.remove(grammar)
    assert pool.shared.n_tokens == 0


def with_deadline(name: str, deadline: float | None) -> Request:
    return Request(RequestId(name), [1], 1, deadline=deadline)


def test_those_expire_that_wait_when_their_time_is_up() -> None:
    pool = RequestPool(max_requests=100)
    requests = [with_deadline(str(index), at) for index, at in enumerate((5.0, None, 3.0, 4.0))]
    for request in requests:
        pool.add(request)
    pool.mark_running([requests[3]], can_run=lambda _: False)
    assert pool.expired(2.9) == []
    assert pool.expired(4.0) == [requests[2]]
    pool.remove(requests[2])
    assert pool.preempt_all() == [requests[3]]
    assert pool.expired(5.0) == [requests[3], requests[0]]


def test_who_was_preempted_expires_once() -> None:
    pool = RequestPool(max_requests=100)
    request = with_deadline("often", 5.0)
    pool.add(request)
    for _ in range(3):
        pool.mark_running([request], can_run=lambda _: False)
        pool.preempt_all()
    assert pool.expired(5.0) == [request]


def test_deadlines_of_requests_that_ended_take_no_memory() -> None:
    pool = RequestPool(max_requests=1000)
    stays = with_deadline("stays", 1e9)
    pool.add(stays)
    for number in range(1000):
        request = with_deadline(str(number), 1e6 + number)
        pool.add(request)
        pool.remove(request)
    assert len(pool.waiting._deadlines) < 100
    assert pool.expired(1e9) == [stays]
