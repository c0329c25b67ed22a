"""The scheduling core against the paper's pseudocode, and its invariants under random arrivals."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, PoolFull
from services.scheduler.core.request import TOKEN_ID, FinishReason, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.algorithm1 import PaperRequest, PaperScheduler
from tests.scheduler.core.invariants import (
    check_batches,
    check_ends,
    check_first_come_first_served,
    check_memory,
    check_no_request_is_in_two_batches,
)
from tests.scheduler.core.workload import (
    PLAIN_TOKEN,
    STOP_TOKEN,
    Arrival,
    Driver,
    arrivals,
    build,
    request_for,
)

MACHINES = {
    "max_batch_size": st.integers(1, 6),
    "pipeline_depth": st.integers(1, 4),
    "block_size": st.sampled_from([1, 4]),
    "n_blocks": st.integers(6, 30),
}


@given(requests=arrivals(), has_prefix_cache=st.booleans(), **MACHINES)
def test_batches_are_those_of_algorithm_1(
    requests: list[Arrival],
    has_prefix_cache: bool,
    max_batch_size: int,
    pipeline_depth: int,
    block_size: int,
    n_blocks: int,
) -> None:
    n_blocks = n_blocks * 4 // block_size  # the longest request must fit whatever the block size
    # Nobody has anything in common with another: the paper knows nothing of that.
    requests = [replace(arrival, scope=b"%d" % index) for index, arrival in enumerate(requests)]
    driver = Driver(
        build(
            max_batch_size=max_batch_size,
            n_blocks=n_blocks,
            block_size=block_size,
            pipeline_depth=pipeline_depth,
            has_prefix_cache=has_prefix_cache,
        ),
        requests,
    )
    paper = PaperScheduler(
        n_workers=pipeline_depth, max_bs=max_batch_size, n_slots=n_blocks * block_size
    )
    while not driver.is_done:
        for index, arrival in enumerate(requests):
            if arrival.turn == driver.turn:
                n_blocks_needed = -(-arrival.max_tokens // block_size)
                paper.request_pool.append(
                    PaperRequest(index, index, n_blocks_needed * block_size, arrival.n_iterations)
                )
        driver.arrive()
        batch = driver.select()
        ours = [] if batch is None else [int(span.request.request_id) for span in batch.spans]
        if driver.scheduler.n_in_flight == pipeline_depth or (batch is None and driver.in_flight):
            driver.return_oldest()
        assert ours == paper.step()
        assert driver.scheduler.kv_manager.n_reserved_slots == paper.n_rsrv
    assert paper.request_pool == []


@given(
    requests=arrivals(with_cancellations=True),
    data=st.data(),
    token_hand_off=st.booleans(),
    has_prefix_cache=st.booleans(),
    **MACHINES,
)
def test_invariants_hold_whatever_arrives_and_is_cancelled(
    requests: list[Arrival],
    data: st.DataObject,
    token_hand_off: bool,
    has_prefix_cache: bool,
    max_batch_size: int,
    pipeline_depth: int,
    block_size: int,
    n_blocks: int,
) -> None:
    scheduler = build(
        max_batch_size=max_batch_size,
        n_blocks=n_blocks * 4 // block_size,
        block_size=block_size,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        has_prefix_cache=has_prefix_cache,
    )
    driver = Driver(scheduler, requests)
    n_iterations = dict.fromkeys(range(len(requests)), 0)
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        for span in batch.spans if batch else ():
            n_iterations[int(span.request.request_id)] += 1
        check_memory(driver)
        check_batches(driver, max_batch_size=max_batch_size)
        if not token_hand_off:
            check_no_request_is_in_two_batches(driver)
        check_first_come_first_served(driver, n_iterations)
        if driver.in_flight and (batch is None or data.draw(st.booleans())):
            driver.return_oldest()
    check_ends(driver)


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = build(max_batch_size=4, n_blocks=4, block_size=4, pipeline_depth=1)
    with pytest.raises(InvalidRequest, match="max_tokens") as error:
        scheduler.submit(request_for(0, Arrival(0, n_prompt=10, max_new_tokens=7, n_iterations=1)))
    assert error.value.field == "max_tokens"
    scheduler.submit(request_for(1, Arrival(0, n_prompt=10, max_new_tokens=6, n_iterations=1)))


def test_a_full_pool_refuses_with_a_retry_delay() -> None:
    scheduler = build(max_batch_size=4, n_blocks=4, block_size=4, pipeline_depth=1)
    scheduler.pool.max_requests = 1
    arrival = Arrival(0, n_prompt=1, max_new_tokens=1, n_iterations=1)
    scheduler.submit(request_for(0, arrival))
    with pytest.raises(PoolFull) as error:
        scheduler.submit(request_for(1, arrival))
    assert error.value.retry_after_s > 0


def test_a_head_that_does_not_fit_holds_back_smaller_ones_behind_it() -> None:
    scheduler = build(max_batch_size=4, n_blocks=10, block_size=1, pipeline_depth=2)
    for index, n_prompt in enumerate([5, 5, 1]):
        scheduler.submit(
            request_for(index, Arrival(0, n_prompt=n_prompt, max_new_tokens=1, n_iterations=1))
        )
    batch = scheduler.select()
    assert batch is not None
    assert [span.request.request_id for span in batch.spans] == ["0"]
    assert scheduler.select() is None


def test_a_late_request_joins_the_next_iteration_and_shares_it_with_a_decode() -> None:
    driver = Driver(
        build(max_batch_size=4, n_blocks=100, block_size=4, pipeline_depth=1),
        [Arrival(0, 9, 5, 5), Arrival(1, 6, 2, 2)],
    )
    shapes = []
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        assert batch is not None
        shapes.append([(s.start_position, s.n_tokens, s.is_admission) for s in batch.spans])
        driver.return_oldest()
    assert shapes == [
        [(0, 9, True)],
        [(9, 1, False), (0, 6, True)],
        [(10, 1, False), (6, 1, False)],
        [(11, 1, False)],
        [(12, 1, False)],
    ]


def test_a_request_cancelled_while_it_runs_ends_when_its_batch_returns() -> None:
    scheduler = build(max_batch_size=4, n_blocks=8, block_size=4, pipeline_depth=1)
    request = request_for(0, Arrival(0, n_prompt=4, max_new_tokens=9, n_iterations=9))
    scheduler.submit(request)
    batch = scheduler.select()
    assert batch is not None
    assert scheduler.cancel(request) == []
    assert scheduler.kv_manager.n_reserved_slots > 0
    [update] = scheduler.apply(batch.iteration, [PLAIN_TOKEN])
    assert (update.token_id, update.finish_reason) == (None, FinishReason.CANCELLED)
    assert scheduler.kv_manager.n_reserved_slots == 0
    assert scheduler.cancel(request) == [], "a second cancellation changes nothing"


def hand_off(*, max_batch_size: int = 4, pipeline_depth: int = 2) -> Scheduler:
    """A scheduler of one stage, whose rank hands tokens over."""
    return build(
        max_batch_size=max_batch_size,
        n_blocks=40,
        block_size=4,
        pipeline_depth=pipeline_depth,
        token_hand_off=True,
    )


def test_with_hand_off_the_same_requests_ride_every_iteration_and_late_ones_the_next() -> None:
    driver = Driver(hand_off(), [Arrival(0, 9, 5, 5), Arrival(0, 3, 5, 5), Arrival(2, 6, 2, 2)])
    shapes = []
    while not driver.is_done:
        driver.arrive()
        while (batch := driver.select()) is not None:
            shapes.append([(s.start_position, len(s.token_ids), s.n_tokens) for s in batch.spans])
        driver.return_oldest()
    assert shapes == [
        [(0, 9, 9), (0, 3, 3)],
        [(9, 0, 1), (3, 0, 1)],  # sent before the first has returned
        [(10, 0, 1), (4, 0, 1)],
        [(11, 0, 1), (5, 0, 1), (0, 6, 6)],
        [(12, 0, 1), (6, 0, 1), (6, 0, 1)],
    ], "and no iteration is planned for a request whose last token is on its way"


def test_with_hand_off_a_token_that_has_come_back_is_sent_along_again() -> None:
    scheduler = hand_off(pipeline_depth=1)
    scheduler.submit(request_for(0, Arrival(0, n_prompt=2, max_new_tokens=3, n_iterations=3)))
    first = scheduler.select()
    assert first is not None
    scheduler.apply(first.iteration, [5])
    second = scheduler.select()
    assert second is not None
    assert second.spans[0].token_ids == [5]


def test_what_a_request_brings_after_its_end_is_thrown_away_and_its_memory_free_then() -> None:
    scheduler = hand_off()
    request = request_for(0, Arrival(0, n_prompt=2, max_new_tokens=9, n_iterations=1))
    scheduler.submit(request)
    first, second = scheduler.select(), scheduler.select()
    assert first is not None
    assert second is not None
    [update] = scheduler.apply(first.iteration, [STOP_TOKEN])
    assert update.finish_reason is FinishReason.STOP
    assert len(scheduler.pool) == 0
    assert scheduler.select() is None
    assert scheduler.kv_manager.n_reserved_slots > 0, "a batch in flight still writes there"
    assert scheduler.apply(second.iteration, [PLAIN_TOKEN]) == []
    assert scheduler.kv_manager.n_reserved_slots == 0
    assert list(request.generated_token_ids) == [STOP_TOKEN]


def test_a_request_cancelled_while_two_batches_have_it_ends_with_the_first() -> None:
    scheduler = hand_off()
    request = request_for(0, Arrival(0, n_prompt=2, max_new_tokens=9, n_iterations=9))
    scheduler.submit(request)
    first, second = scheduler.select(), scheduler.select()
    assert first is not None
    assert second is not None
    assert scheduler.cancel(request) == []
    [update] = scheduler.apply(first.iteration, [PLAIN_TOKEN])
    assert update.finish_reason is FinishReason.CANCELLED
    assert scheduler.select() is None
    assert scheduler.apply(second.iteration, [PLAIN_TOKEN]) == []
    assert scheduler.kv_manager.n_reserved_slots == 0


def test_released_rows_are_told_with_the_next_batch_and_only_then() -> None:
    scheduler = build(max_batch_size=1, n_blocks=8, block_size=4, pipeline_depth=1)
    for index in range(2):
        scheduler.submit(request_for(index, Arrival(0, 1, 1, 1)))
    first = scheduler.select()
    assert first is not None
    scheduler.apply(first.iteration, [PLAIN_TOKEN])
    second = scheduler.select()
    assert second is not None
    assert (first.released_rows, second.released_rows) == ((), (0,))
    assert second.spans[0].request.reservation is not None
    assert second.spans[0].request.reservation.row == 0


@pytest.mark.parametrize("n_tokens", [0, 2], ids=["too few", "too many"])
def test_tokens_that_do_not_match_the_batch_are_refused(n_tokens: int) -> None:
    scheduler = build(max_batch_size=1, n_blocks=8, block_size=4, pipeline_depth=1)
    scheduler.submit(request_for(0, Arrival(0, 1, 1, 1)))
    batch = scheduler.select()
    assert batch is not None
    with pytest.raises(ValueError, match=f"returned {n_tokens} tokens instead of 1"):
        scheduler.apply(batch.iteration, [PLAIN_TOKEN] * n_tokens)


def test_results_out_of_order_are_refused() -> None:
    scheduler = build(max_batch_size=1, n_blocks=8, block_size=4, pipeline_depth=2)
    for index in range(2):
        scheduler.submit(request_for(index, Arrival(0, 1, 2, 2)))
    assert scheduler.select() is not None
    second = scheduler.select()
    assert second is not None
    with pytest.raises(ValueError, match="oldest in flight"):
        scheduler.apply(second.iteration, [PLAIN_TOKEN])


def test_a_span_may_cross_from_the_prompt_into_generated_tokens() -> None:
    generated = array(TOKEN_ID, [4, 5, 6])
    request = Request(RequestId("r"), [1, 2, 3], 5, generated_token_ids=generated)
    sequence = [1, 2, 3, 4, 5, 6]
    for start in range(6):
        for n_tokens in range(1, 7 - start):
            assert request.span(start, n_tokens) == sequence[start : start + n_tokens]
