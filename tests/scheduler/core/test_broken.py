"""Requests whose numbers are not finite: each fails alone, and what it has stored spoils nobody."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.suspects import NOT_FINITE
from services.scheduler.core.batch import Update
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.kv_groups import ONE_GROUP, BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import (
    TOKEN_ID,
    FinishReason,
    Request,
    RequestId,
    RequestState,
)
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation

N_BLOCKS, BLOCK_SIZE = 64, 4


def scheduler_of(
    *,
    pipeline_depth: int = 1,
    token_hand_off: bool = False,
    drafter: Drafter | None = None,
    groups: BlockGroups = ONE_GROUP,
) -> Scheduler:
    return Scheduler(
        RequestPool(max_requests=99),
        KVManager(n_blocks=N_BLOCKS, block_size=BLOCK_SIZE, groups=groups, has_prefix_cache=True),
        policy=ChunkedPolicy(max_batch_size=8, max_batch_tokens=16),
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        drafter=drafter,
    )


def request_of(name: str, prompt: list[int], *, max_new_tokens: int = 4) -> Request:
    return Request(
        RequestId(name), array(TOKEN_ID, prompt), max_new_tokens, speculation=Speculation()
    )


def run(scheduler: Scheduler, broken: set[str], *, token_id: int = 9) -> list[Update]:
    """Runs one iteration in which the requests called `broken` have numbers that are not finite."""
    batch = scheduler.select()
    assert batch is not None
    places = [i for i, span in enumerate(batch.spans) if span.request.request_id in broken]
    return scheduler.apply(
        batch.iteration, [token_id] * (batch.n_sampled + batch.n_drafts), broken=places
    )


def run_to_the_end(scheduler: Scheduler) -> None:
    while len(scheduler.pool):
        run(scheduler, set())


def test_a_request_that_is_broken_fails_and_no_other_does() -> None:
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.submit(request_of(name, [1, 2, 3]))
    updates = {str(one.request.request_id): one for one in run(scheduler, {"b"})}
    assert (updates["b"].finish_reason, updates["b"].message) == (FinishReason.FAILED, NOT_FINITE)
    assert updates["b"].token_id is None
    assert [(updates[name].token_id, updates[name].finish_reason) for name in "ac"] == [
        (9, None)
    ] * 2
    assert not scheduler.pool.has_trials
    run_to_the_end(scheduler)


def test_a_request_that_is_broken_alone_fails_and_the_next_one_runs() -> None:
    scheduler = scheduler_of()
    scheduler.submit(request_of("a", [1, 2, 3]))
    [update] = run(scheduler, {"a"})
    assert update.finish_reason is FinishReason.FAILED
    scheduler.submit(request_of("b", [1, 2, 3]))
    run_to_the_end(scheduler)


def test_a_chunk_of_a_prompt_may_be_broken() -> None:
    """As with log-probabilities of a prompt, of which one is not finite."""
    scheduler = scheduler_of()
    scheduler.submit(request_of("a", [1] * 40))
    [update] = run(scheduler, {"a"})
    assert update.finish_reason is FinishReason.FAILED
    assert len(scheduler.pool) == 0
    assert scheduler.kv_manager.n_allocated_blocks == 0


def test_a_broken_request_whose_next_batch_is_in_flight_frees_its_memory_afterwards() -> None:
    scheduler = scheduler_of(pipeline_depth=2, token_hand_off=True)
    request = request_of("a", [1, 2, 3])
    scheduler.submit(request)
    first, second = scheduler.select(), scheduler.select()
    assert first is not None
    assert second is not None
    [update] = scheduler.apply(first.iteration, [0], broken=[0])
    assert update.finish_reason is FinishReason.FAILED
    assert request.reservation is not None
    assert scheduler.apply(second.iteration, [0], broken=[0]) == []
    assert request.reservation is None


def test_drafts_of_a_broken_request_are_not_accepted() -> None:
    scheduler = scheduler_of(drafter=Drafter(max_drafts=4, max_batch_tokens=16))
    request = request_of("a", [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 3], max_new_tokens=20)
    scheduler.submit(request)
    run(scheduler, set())
    batch = scheduler.select()
    assert batch is not None
    assert batch.n_drafts
    [update] = scheduler.apply(batch.iteration, [*batch.spans[0].token_ids[1:], 7], broken=[0])
    assert (update.token_id, update.finish_reason) == (None, FinishReason.FAILED)
    assert list(request.generated_token_ids) == [9]


def test_nobody_gets_what_a_broken_request_has_stored() -> None:
    scheduler = scheduler_of()
    prompt = list(range(12))
    scheduler.submit(request_of("before", prompt[:10]))
    run_to_the_end(scheduler)
    scheduler.submit(request_of("broken", prompt))
    run(scheduler, {"broken"})
    after = request_of("after", prompt)
    scheduler.submit(after)
    run(scheduler, set())
    assert after.n_cached_tokens == 0


def test_blocks_that_others_use_are_found_no_more_and_free_at_the_end() -> None:
    scheduler = scheduler_of()
    prompt = list(range(12))
    user = request_of("user", prompt, max_new_tokens=3)
    scheduler.submit(user)
    run(scheduler, set())
    scheduler.submit(request_of("broken", prompt))
    run(scheduler, {"broken"})
    assert user.state is not RequestState.FINISHED
    later = request_of("later", prompt)
    scheduler.submit(later)
    run_to_the_end(scheduler)
    assert later.n_cached_tokens == 0
    assert scheduler.kv_manager.n_allocated_blocks == 0
    assert scheduler.kv_manager.n_reserved_blocks == 0


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)], ids=str)
@given(data=st.data())
def test_every_block_is_free_or_cached_at_the_end(
    windows: tuple[int | None, ...], data: st.DataObject
) -> None:
    scheduler = scheduler_of(groups=BlockGroups(windows, 16))
    stem = [1] * 24
    for number in range(8):
        length = data.draw(st.integers(1, 24))
        scheduler.submit(request_of(str(number), [*stem[:length], number]))
        for _ in range(data.draw(st.integers(0, 2))):
            run(scheduler, data.draw(st.sets(st.sampled_from("01234567"), max_size=3)))
            if not len(scheduler.pool):
                break
    run_to_the_end(scheduler)
    kv_manager = scheduler.kv_manager
    assert (kv_manager.n_allocated_blocks, kv_manager.n_reserved_blocks) == (0, 0)
    taken = kv_manager.blocks.take(N_BLOCKS)
    assert sorted(taken) == list(range(N_BLOCKS)), "each block once"
