"""Checks of conditions that always hold for a scheduler, whichever requests arrive and whichever
policy chooses."""

from services.scheduler.core.request import FinishReason, RequestState
from tests.scheduler.core.workload import Driver


def check_memory(driver: Driver) -> None:
    """Checks the K/V memory: no more is reserved than there is, and no more is assigned than is
    reserved. Only a block in the prefix cache may belong to several requests. A request that has
    ended holds only memory that batches in flight still use."""
    scheduler = driver.scheduler
    kv_manager = scheduler.kv_manager
    running = {span.request for batch in driver.in_flight for span in batch.spans}
    reservations = [
        request.reservation
        for request in {*scheduler.pool, *running}
        if request.reservation is not None
    ]
    assert all(request.reservation is not None for request in running)
    assert kv_manager.n_reserved_slots <= kv_manager.n_slots
    assert all(len(r.block_ids) <= r.n_reserved_blocks for r in reservations)
    owned = [block for r in reservations for block in r.block_ids]
    n_owned, n_outstanding = len(set(owned)), sum(r.n_reserved_blocks for r in reservations)
    assert n_owned + n_outstanding - len(owned) == kv_manager.n_reserved_blocks
    assert n_owned * kv_manager.block_size == kv_manager.n_allocated_slots
    assert kv_manager.n_allocated_slots + kv_manager.n_unused_slots <= kv_manager.n_slots
    if not kv_manager.has_prefix_cache:
        assert len(owned) == n_owned
    else:
        shared = {block for block in owned if owned.count(block) > 1}
        assert all(block in kv_manager.prefix_cache for block in shared)
    rows = [r.row for r in reservations]
    assert len(rows) == len(set(rows))


def check_batches(driver: Driver, *, max_batch_size: int) -> None:
    """Checks that no more batches are in flight than allowed, and that none is too large. Each
    request in a batch must be running, or must have ended in an earlier batch. Also checks the
    pool's counts of requests and of prompt tokens that are not yet scheduled."""
    assert len(driver.in_flight) <= driver.scheduler.pipeline_depth
    assert all(1 <= len(batch.spans) <= max_batch_size for batch in driver.in_flight)
    for batch in driver.in_flight:
        requests = [span.request for span in batch.spans]
        assert len(requests) == len(set(requests))
        assert {r.state for r in requests} <= {RequestState.RUNNING, RequestState.FINISHED}
    pool = driver.scheduler.pool
    left = [one.n_prefill_tokens - one.n_scheduled for one in pool.running if not one.is_decoding]
    assert pool.prefills.n_tokens == sum(left)
    assert len(pool) == len(list(pool))


def check_no_request_is_in_two_batches(driver: Driver) -> None:
    """Checks that no request is in two batches in flight, as in the paper."""
    running = [span.request for batch in driver.in_flight for span in batch.spans]
    assert len(running) == len(set(running))
    assert all(request.state is RequestState.RUNNING for request in running)


def check_first_come_first_served(driver: Driver, n_iterations: dict[int, int]) -> None:
    """Checks for all requests that want to run: an earlier request has run at least as often as a
    later one."""
    alive = sorted(
        (
            index
            for index, request in driver.requests.items()
            if request.state is not RequestState.FINISHED
            and not request.is_cancelled
            and len(request.generated_token_ids) + request.n_awaited < request.max_new_tokens
        ),
        key=lambda index: driver.requests[index].arrival,
    )
    counts = [n_iterations[index] for index in alive]
    assert counts == sorted(counts, reverse=True)


def check_ends(driver: Driver) -> None:
    """Checks that every request ended exactly once, with exactly the tokens that were reported.
    When the last batch has returned, no memory may be held."""
    while driver.in_flight:
        driver.return_oldest()
    check_memory(driver)
    assert driver.scheduler.kv_manager.n_reserved_slots == 0
    assert driver.scheduler.kv_manager.n_allocated_slots == 0
    for index, request in driver.requests.items():
        mine = [update for update in driver.updates if update.request is request]
        assert [u.finish_reason for u in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason is not None
        tokens = [update.token_id for update in mine if update.token_id is not None]
        assert tokens == list(request.generated_token_ids)
        places = [update.n_generated for update in mine if update.token_id is not None]
        assert places == list(range(1, len(tokens) + 1))
        if mine[-1].finish_reason is not FinishReason.CANCELLED:
            assert len(tokens) == driver.arrivals[index].n_iterations
