"""The scheduling core against the paper's pseudocode, and its invariants under random arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, PoolFull
from services.scheduler.request import FinishReason, Request, RequestId, RequestState
from services.scheduler.scheduler import Scheduler
from tests.scheduler.algorithm1 import PaperRequest, PaperScheduler
from tests.scheduler.workload import (
    PLAIN_TOKEN,
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


@given(requests=arrivals(), **MACHINES)
def test_batches_are_those_of_algorithm_1(
    requests: list[Arrival],
    max_batch_size: int,
    pipeline_depth: int,
    block_size: int,
    n_blocks: int,
) -> None:
    n_blocks = n_blocks * 4 // block_size  # the longest request must fit whatever the block size
    driver = Driver(
        build(
            max_batch_size=max_batch_size,
            n_blocks=n_blocks,
            block_size=block_size,
            pipeline_depth=pipeline_depth,
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


@given(requests=arrivals(with_cancellations=True), data=st.data(), **MACHINES)
def test_invariants_hold_whatever_arrives_and_is_cancelled(
    requests: list[Arrival],
    data: st.DataObject,
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
    )
    driver = Driver(scheduler, requests)
    n_iterations = dict.fromkeys(range(len(requests)), 0)
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        for span in batch.spans if batch else ():
            n_iterations[int(span.request.request_id)] += 1
        check_memory(scheduler)
        check_batches(driver, max_batch_size=max_batch_size)
        check_first_come_first_served(driver, n_iterations)
        if driver.in_flight and (batch is None or data.draw(st.booleans())):
            driver.return_oldest()
    check_memory(scheduler)
    assert scheduler.kv_manager.n_reserved_slots == 0
    assert scheduler.kv_manager.n_allocated_slots == 0
    check_ends(driver)


def check_memory(scheduler: Scheduler) -> None:
    """Reserved <= slots; assigned <= reserved; every block has one owner."""
    kv_manager = scheduler.kv_manager
    reservations = [r.reservation for r in scheduler.pool if r.reservation is not None]
    assert kv_manager.n_reserved_slots <= kv_manager.n_slots
    assert sum(r.n_reserved_blocks for r in reservations) == kv_manager.n_reserved_blocks
    assert all(len(r.block_ids) <= r.n_reserved_blocks for r in reservations)
    owned = [block for r in reservations for block in r.block_ids]
    assert len(owned) == len(set(owned))
    assert len(owned) * kv_manager.block_size == kv_manager.n_allocated_slots
    rows = [r.row for r in reservations]
    assert len(rows) == len(set(rows))


def check_batches(driver: Driver, *, max_batch_size: int) -> None:
    """Few enough in flight, none too large, no request in two."""
    assert len(driver.in_flight) <= driver.scheduler.pipeline_depth
    assert all(1 <= len(batch.spans) <= max_batch_size for batch in driver.in_flight)
    running = [span.request for batch in driver.in_flight for span in batch.spans]
    assert len(running) == len(set(running))
    assert all(request.state is RequestState.RUNNING for request in running)


def check_first_come_first_served(driver: Driver, n_iterations: dict[int, int]) -> None:
    """Of two requests that are both in the pool, the earlier has run as often, or more often."""
    alive = sorted(
        (index for index, r in driver.requests.items() if r.state is not RequestState.FINISHED),
        key=lambda index: driver.requests[index].arrival,
    )
    counts = [n_iterations[index] for index in alive]
    assert counts == sorted(counts, reverse=True)


def check_ends(driver: Driver) -> None:
    """Every request ended exactly once, with as many tokens as it was told about."""
    for index, request in driver.requests.items():
        mine = [update for update in driver.updates if update.request is request]
        assert [u.finish_reason for u in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason is not None
        tokens = [update.token_id for update in mine if update.token_id is not None]
        assert tokens == request.generated_token_ids
        if mine[-1].finish_reason is not FinishReason.CANCELLED:
            assert len(tokens) == driver.arrivals[index].n_iterations


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
        shapes.append([(s.start_position, len(s.token_ids), s.is_admission) for s in batch.spans])
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
    assert scheduler.cancel(request) is None
    assert scheduler.kv_manager.n_reserved_slots > 0
    [update] = scheduler.apply(batch.iteration, [PLAIN_TOKEN])
    assert (update.token_id, update.finish_reason) == (None, FinishReason.CANCELLED)
    assert scheduler.kv_manager.n_reserved_slots == 0
    assert scheduler.cancel(request) is None, "a second cancellation changes nothing"


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
    with pytest.raises(ValueError, match="tokens for 1 spans"):
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
    request = Request(RequestId("r"), prompt_token_ids=[1, 2, 3], max_new_tokens=5)
    request.generated_token_ids = [4, 5, 6]
    sequence = [1, 2, 3, 4, 5, 6]
    for start in range(6):
        for n_tokens in range(1, 7 - start):
            assert request.span(start, n_tokens) == sequence[start : start + n_tokens]
