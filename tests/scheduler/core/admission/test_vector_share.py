"""Prompts of vectors beside answers: what they may take of a batch."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.vector_share import VectorShare
from services.scheduler.core.batch import Batch
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.order import Order, OrderOptions
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
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


def submit(scheduler: Scheduler, n_prompts: Sequence[int], *, max_new_tokens: int) -> list[Request]:
    begin = scheduler.pool.shared.n_arrived
    asked = [
        Request(RequestId(str(begin + i)), range(n), max_new_tokens)
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


def test_a_share_is_a_token_at_least_and_no_nonsense() -> None:
    assert VectorShare(1e-6).n_tokens(OVERHEAD) == 1
    assert VectorShare(2.0).n_tokens(OVERHEAD) == 32
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match="vector_share"):
            VectorShare(wrong)


def test_a_batch_is_full_with_the_share_of_vectors_and_not_with_all_their_tokens() -> None:
    policy = ChunkedPolicy(max_batch_size=8, max_batch_tokens=BATCH_TOKENS, vector_share=0.25)
    policy.prompt_groups.learn_overhead(OVERHEAD)
    vector = Request(RequestId("vector"), range(100), 0)
    short, long = (Request(RequestId(str(n)), range(n), 4) for n in (3, 28))
    assert policy.is_full([vector])
    assert not policy.is_full([vector, short])
    assert policy.is_full([vector, long])


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
        answers_run = any(not one.wants_vector for one in pool.running)
        batch = scheduler.select()
        if batch is not None:
            in_flight.append(batch)
            vectors = [span.n_tokens for span in batch.spans if span.request.wants_vector]
            if answers_run and share is not None:
                assert sum(vectors) <= max(1, int(OVERHEAD * share))
        elif in_flight:
            oldest = in_flight.pop(0)
            scheduler.apply(oldest.iteration, [7] * oldest.n_sampled)
        elif not due:
            break
        assert pool.n_running_vectors == sum(one.wants_vector for one in pool.running)
        waiting = [one for one in pool.order if one.wants_vector]
        assert pool.n_waiting_vectors == len(waiting)
    assert [len(one.generated_token_ids) for one in asked] == [one.max_new_tokens for one in asked]
    assert len(scheduler.pool) == scheduler.kv_manager.n_reserved_slots == 0
    assert pool.shared.n_vectors == 0
