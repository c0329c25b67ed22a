"""Prompts of vectors beside answers: what they may take of a batch."""

import math
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.scheduler.core.admission.backlog import NOTHING, Backlog
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.overhead import MIN_OVERHEAD_TOKENS
from services.scheduler.core.admission.vector_gate import VectorGate
from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.order import Order, OrderOptions
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.vector_share import MAX_SHARE, share_tokens
from services.scheduler.core.request import Request, RequestId, RequestState
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.core.workload import build

BATCH_TOKENS = 32
OVERHEAD = 16


def core(
    share: float | None = 0.25, *, depth: int = 1, order: Order | None = None, n_blocks: int = 400
) -> Scheduler:
    """A scheduler whose selections are checked, and which knows what an iteration costs."""
    policy = ChunkedPolicy(max_batch_size=8, max_batch_tokens=BATCH_TOKENS, vector_share=share)
    scheduler = build(
        max_batch_size=8,
        n_blocks=n_blocks,
        block_size=4,
        pipeline_depth=depth,
        order=order,
        policy=CheckedPolicy(policy),
    )
    scheduler.learn_overhead(OVERHEAD)
    return scheduler


def submit(
    scheduler: Scheduler,
    n_prompts: Sequence[int],
    *,
    max_new_tokens: int,
    account: AccountUse | None = None,
) -> list[Request]:
    begin = scheduler.pool.shared.n_arrived
    asked = [
        Request(RequestId(str(begin + i)), range(n), max_new_tokens, account=account)
        for i, n in enumerate(n_prompts)
    ]
    for one in asked:
        scheduler.submit(one)
    return asked


def step(scheduler: Scheduler) -> dict[Request, int]:
    """Runs a batch, and returns the tokens of each request in it."""
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, [7] * batch.n_sampled)
    return {span.request: span.n_tokens for span in batch.spans}


def test_beside_an_answer_vectors_get_their_share() -> None:
    scheduler = core()
    (answer,) = submit(scheduler, [3], max_new_tokens=50)
    step(scheduler)
    flood = submit(scheduler, [10] * 20, max_new_tokens=0)
    assert step(scheduler) == {answer: 1, flood[0]: 4}
    assert step(scheduler) == {answer: 1, flood[0]: 4}
    assert step(scheduler) == {answer: 1, flood[0]: 2, flood[1]: 2}


def test_an_answer_behind_a_flood_begins_at_once() -> None:
    scheduler = core()
    submit(scheduler, [3], max_new_tokens=50)
    step(scheduler)
    flood = submit(scheduler, [10] * 20, max_new_tokens=0)
    (late,) = submit(scheduler, [5], max_new_tokens=2)
    assert step(scheduler)[late] == 5
    assert flood[-1].reservation is None


def test_without_answers_vectors_fill_batches() -> None:
    scheduler = core()
    submit(scheduler, [10] * 20, max_new_tokens=0)
    assert sum(step(scheduler).values()) == BATCH_TOKENS
    assert sum(step(scheduler).values()) == BATCH_TOKENS


def test_after_the_last_answer_vectors_fill_batches_again() -> None:
    scheduler = core()
    submit(scheduler, [3], max_new_tokens=2)
    submit(scheduler, [10] * 20, max_new_tokens=0)
    sums = [sum(step(scheduler).values()) for _ in range(4)]
    assert sums[1] == 1 + 4
    assert sums[2:] == [BATCH_TOKENS] * 2


def test_without_a_share_vectors_fill_batches_beside_answers() -> None:
    scheduler = core(None)
    submit(scheduler, [3], max_new_tokens=50)
    step(scheduler)
    submit(scheduler, [10] * 20, max_new_tokens=0)
    assert sum(step(scheduler).values()) == BATCH_TOKENS


def test_a_share_is_a_token_at_least_and_a_number_of_sense() -> None:
    assert share_tokens(OVERHEAD, 1e-6) == 1
    assert share_tokens(OVERHEAD, 2.0) == 32
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="vector_share"):
            core(wrong)
        with pytest.raises(ValidationError, match="vector_share"):
            SchedulerSettings(n_stages=1, vector_share=wrong)


@pytest.mark.parametrize("share", [None, MAX_SHARE])
def test_with_the_largest_share_vectors_are_not_limited(share: float | None) -> None:
    policy = ChunkedPolicy(max_batch_size=8, max_batch_tokens=2**15, vector_share=share)
    policy.prompt_groups.learn_overhead(MIN_OVERHEAD_TOKENS)
    vector = Request(RequestId("vector"), range(2**15), 0)
    answer = Request(RequestId("answer"), range(3), 4)
    assert policy.is_full([vector, answer])


def test_an_answer_that_comes_while_none_runs_begins_at_once() -> None:
    scheduler = core()
    flood = submit(scheduler, [10] * 40, max_new_tokens=0)
    step(scheduler)
    (answer,) = submit(scheduler, [5], max_new_tokens=2)
    assert step(scheduler)[answer] == 5
    assert flood[-1].reservation is None


def test_a_large_share_holds_back_no_answer() -> None:
    scheduler = core(1.9)
    (vector,) = submit(scheduler, [400], max_new_tokens=0)
    step(scheduler)
    (answer,) = submit(scheduler, [5], max_new_tokens=2)
    assert step(scheduler) == {vector: 30, answer: 2}


def test_streams_go_on_beside_a_vector_of_another_client() -> None:
    order = Fair.of(OrderOptions(batch_tokens=None), lambda: 0.0)
    scheduler = core(order=order)
    accounts = {name: AccountUse(AccountLimits(), name=name) for name in "ab"}
    submit(scheduler, [300], max_new_tokens=0, account=accounts["a"])
    streams = submit(scheduler, [3] * 7, max_new_tokens=150, account=accounts["a"])
    while not all(one.generated_token_ids for one in streams):
        step(scheduler)
    (vector,) = submit(scheduler, [10], max_new_tokens=0, account=accounts["b"])
    before = [len(one.generated_token_ids) for one in streams]
    for _ in range(90):
        step(scheduler)
    assert [len(one.generated_token_ids) - n for one, n in zip(streams, before, strict=True)] == (
        [90] * 7
    )
    assert vector.state is RequestState.FINISHED


def test_while_a_suspect_is_on_trial_vectors_are_not_limited() -> None:
    scheduler = core()
    submit(scheduler, [3], max_new_tokens=50)
    step(scheduler)
    (suspect,) = submit(scheduler, [200], max_new_tokens=0)
    assert scheduler.pool.has_both_kinds
    suspect.n_losses = 2
    scheduler.pool.shared.suspects[suspect] = None
    assert scheduler.pool.has_trials
    assert not scheduler.pool.has_both_kinds


@pytest.mark.parametrize("vectors_yield", [True, False])
def test_vectors_are_before_an_answer_only_where_they_do_not_yield(vectors_yield: bool) -> None:
    backlog = Backlog(ExpectedOutput(), is_fair=False, vectors_yield=vectors_yield)
    answer, other = (Request(RequestId(name), range(5), 4) for name in "ab")
    flood = [Request(RequestId(str(i)), range(10), 0) for i in range(3)]
    for one in (*flood, answer):
        backlog.add(one)
    assert backlog.before(other).n_prompt_tokens == (5 if vectors_yield else 35)
    assert backlog.before(flood[0]).n_prompt_tokens == 35
    for one in (*flood, answer):
        backlog.remove(one)
    assert backlog.work == NOTHING


def test_a_batch_is_full_with_the_share_of_vectors_and_not_with_all_their_tokens() -> None:
    policy = ChunkedPolicy(max_batch_size=8, max_batch_tokens=BATCH_TOKENS, vector_share=0.25)
    policy.prompt_groups.learn_overhead(OVERHEAD)
    vector = Request(RequestId("vector"), range(100), 0)
    short, long = (Request(RequestId(str(n)), range(n), 4) for n in (3, 28))
    assert policy.is_full([vector])
    assert not policy.is_full([vector, short])
    assert policy.is_full([vector, long])


def test_after_a_loss_the_requests_for_vectors_wait_and_are_counted_as_waiting() -> None:
    scheduler = core()
    submit(scheduler, [100, 100], max_new_tokens=0)
    assert scheduler.select() is not None
    assert scheduler.pool.n_running_vectors == 1
    scheduler.suspend()
    assert (scheduler.pool.n_running_vectors, scheduler.pool.shared.n_waiting_vectors) == (0, 2)


class OneOfAClient:
    """Limits of an order: only requests with even ids ride, with a token each."""

    def riders(self, candidates: Iterable[Request], max_running: int) -> Iterator[Request]:
        return (one for one in candidates if int(one.request_id) % 2 == 0)

    def take(self, request: Request, n_tokens: int) -> int:
        return 1


def test_the_limits_of_the_order_hold_beside_the_gate() -> None:
    gate = VectorGate()
    asked = [Request(RequestId(str(i)), range(10), 4 * (i == 4)) for i in range(7)]
    limits = gate.limits(2, OneOfAClient(), only_vectors_wait=False)
    assert limits is gate
    taken = {
        request.request_id: limits.take(request, 10)
        for request in limits.riders(gate.passing(iter(asked)), 8)
    }
    assert taken == {"0": 1, "2": 1, "4": 1}


def test_an_answer_is_called_though_a_vector_of_its_client_waits_before_it() -> None:
    order = Fair.of(OrderOptions(), lambda: 0.0)
    scheduler = core(order=order)
    accounts = {name: AccountUse(AccountLimits(), name=name) for name in "ab"}
    streams = submit(scheduler, [3] * 8, max_new_tokens=150, account=accounts["a"])
    while not all(one.generated_token_ids for one in streams):
        step(scheduler)
    (vector,) = submit(scheduler, [10], max_new_tokens=0, account=accounts["b"])
    (answer,) = submit(scheduler, [5], max_new_tokens=2, account=accounts["b"])
    batch = step(scheduler)
    assert answer in batch
    assert vector not in batch


@given(
    kinds=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 1, 6]), st.integers(0, 6)),
        min_size=1,
        max_size=20,
    ),
    depth=st.integers(1, 3),
    is_fair=st.booleans(),
    n_blocks=st.integers(12, 60),
    share=st.sampled_from([None, 0.01, 0.25, 1.0]),
)
def test_every_request_ends_and_no_batch_has_more_vectors_than_their_share(
    kinds: list[tuple[int, int, int]],
    depth: int,
    is_fair: bool,
    n_blocks: int,
    share: float | None,
) -> None:
    order = Fair.of(OrderOptions(), lambda: 0.0) if is_fair else None
    scheduler = core(share, depth=depth, order=order, n_blocks=n_blocks)
    due = sorted(enumerate(kinds), key=lambda one: one[1][2])
    asked: list[Request] = []
    in_flight: list[Batch] = []
    for turn in range(10_000):
        while due and due[0][1][2] <= turn:
            n_prompt, max_new_tokens, _ = due.pop(0)[1]
            asked += submit(scheduler, [n_prompt], max_new_tokens=max_new_tokens)
        pool = scheduler.pool
        is_limited = pool.has_both_kinds and share is not None
        batch = scheduler.select()
        if batch is not None:
            in_flight.append(batch)
            vectors = [span.n_tokens for span in batch.spans if span.request.wants_vector]
            if is_limited and share is not None:
                assert sum(vectors) <= max(1, int(OVERHEAD * share))
        elif in_flight:
            oldest = in_flight.pop(0)
            scheduler.apply(oldest.iteration, [7] * oldest.n_sampled)
        elif not due:
            break
        assert pool.n_running_vectors == sum(one.wants_vector for one in pool.running)
        waiting = [one for one in pool.order if not one.wants_vector]
        assert pool.n_waiting_answers == len(waiting)
    assert [len(one.generated_token_ids) for one in asked] == [one.max_new_tokens for one in asked]
    assert len(scheduler.pool) == scheduler.kv_manager.n_reserved_slots == 0
    assert pool.shared.n_vectors == 0
