"""Requests over epochs that are lost: each goes on where it was, and one that ends epochs ends
itself and nobody else."""

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import (
    MAX_LOSSES,
    N_PROVING_TOKENS,
    TOKEN_ID,
    FinishReason,
    Request,
    RequestState,
)
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.invariants import check_batches, check_ends, check_memory
from tests.scheduler.core.workload import (
    PLAIN_TOKEN,
    Arrival,
    Driver,
    arrivals,
    build,
    request_for,
)

POLICIES: dict[str, Policy] = {
    "orca": OrcaPolicy(max_batch_size=4),
    "chunked": ChunkedPolicy(max_batch_size=4, max_batch_tokens=6),
}


@dataclass(frozen=True)
class Machine:
    """A pipeline in which batches are lost."""

    token_hand_off: bool
    pipeline_depth: int

    def build(self, policy: str) -> Scheduler:
        return build(
            max_batch_size=4,
            n_blocks=20,
            block_size=4,
            pipeline_depth=self.pipeline_depth,
            token_hand_off=self.token_hand_off,
            policy=POLICIES[policy],
        )


def next_epoch(scheduler: Scheduler) -> Scheduler:
    """Returns the scheduler of the epoch after this one, with its pool."""
    kv_manager = scheduler.kv_manager
    following = build(
        max_batch_size=4,
        n_blocks=kv_manager.n_blocks,
        block_size=kv_manager.block_size,
        pipeline_depth=scheduler.pipeline_depth,
        token_hand_off=scheduler.token_hand_off,
        policy=scheduler.policy,
    )
    following.pool = scheduler.pool
    return following


@dataclass
class LossyDriver(Driver):
    """A driver whose engine dies now and then."""

    n_on_board: dict[Request, int] = field(default_factory=dict)
    """Losses in a row with the request in a batch, before it had proved itself."""
    n_losses: int = 0

    def lose(self) -> None:
        """Loses the epoch with everything in flight, and begins the next."""
        for request in {span.request for batch in self.in_flight for span in batch.spans}:
            self.n_on_board[request] = self.n_on_board.get(request, 0) + 1
        self.in_flight.clear()
        self.n_losses += 1
        _, ends = self.scheduler.suspend()
        self.scheduler = next_epoch(self.scheduler)
        self.updates += [*ends, *self.scheduler.adopt()]
        assert self.scheduler.kv_manager.n_reserved_slots == 0
        assert all(request.state is RequestState.INITIATION for request in self.scheduler.pool)

    def return_oldest(self) -> None:
        n_before = len(self.updates)
        super().return_oldest()
        for update in self.updates[n_before:]:
            if update.request.n_new_tokens >= N_PROVING_TOKENS:
                self.n_on_board.pop(update.request, None)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    requests=arrivals(with_cancellations=True),
    data=st.data(),
    machine=st.builds(Machine, st.booleans(), st.integers(1, 3)),
)
def test_every_token_comes_once_whatever_is_lost(
    policy: str,
    requests: list[Arrival],
    data: st.DataObject,
    machine: Machine,
) -> None:
    driver = LossyDriver(machine.build(policy), requests)
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        check_memory(driver)
        check_batches(driver, max_batch_size=4)
        check_trial(driver, batch)
        what = data.draw(st.sampled_from(["lose", "return", "return", "return", "wait"]))
        if what == "lose" and driver.n_losses < 6:
            driver.lose()
            check_failures(driver)
        elif driver.in_flight and (batch is None or what == "return"):
            driver.return_oldest()
    failed = {u.request for u in driver.updates if u.finish_reason is FinishReason.FAILED}
    driver.requests = {i: one for i, one in driver.requests.items() if one not in failed}
    check_ends(driver)


def check_trial(driver: LossyDriver, batch: Batch | None) -> None:
    """A suspect on trial is admitted alone, and no other request before it has a token."""
    on_trial = [request for request in driver.scheduler.pool.running if request.needs_trial]
    assert len(on_trial) <= 1
    if batch is not None and on_trial:
        admitted = [span.request for span in batch.spans if span.is_admission]
        assert admitted in ([], on_trial)


def check_failures(driver: LossyDriver) -> None:
    """A request that failed was in flight for as many losses in a row as allowed, or for more."""
    for update in driver.updates:
        if update.finish_reason is FinishReason.FAILED:
            assert driver.n_on_board.get(update.request, MAX_LOSSES) >= MAX_LOSSES
            assert update.message


@pytest.mark.parametrize("policy", POLICIES)
@given(
    requests=arrivals(),
    data=st.data(),
    machine=st.builds(Machine, st.booleans(), st.integers(1, 3)),
)
def test_a_request_that_ends_every_epoch_ends_itself_and_nobody_else(
    policy: str,
    requests: list[Arrival],
    data: st.DataObject,
    machine: Machine,
) -> None:
    driver = LossyDriver(machine.build(policy), requests)
    killer = data.draw(st.integers(0, len(requests) - 1))
    deadly_position = data.draw(st.integers(0, requests[killer].max_tokens - 1))
    only_decodes = data.draw(st.booleans())
    while not driver.is_done:
        driver.arrive()
        driver.select()
        if any(
            span.request is driver.requests.get(killer)
            and is_deadly(span, deadly_position, only_decodes=only_decodes)
            for batch in driver.in_flight[:1]
            for span in batch.spans
        ):
            driver.lose()
        elif driver.in_flight:
            driver.return_oldest()
    # Between two losses a recomputation brings one token, so that it may even come to its end.
    assert driver.n_losses in (range(MAX_LOSSES + 1) if only_decodes else (0, MAX_LOSSES))
    for index, request in driver.requests.items():
        reasons = [update.finish_reason for update in driver.updates if update.request is request]
        failed = FinishReason.FAILED in reasons
        assert failed == (index == killer and driver.n_losses == MAX_LOSSES)
        if not failed:
            assert len(request.generated_token_ids) == requests[index].n_iterations


def is_deadly(span: Span, position: int, *, only_decodes: bool) -> bool:
    """Whether the rank dies of a span of the deadly request: of a certain token, however it is run;
    or of any decode from a position on, so that a recomputation works."""
    end = span.start_position + span.n_tokens
    if only_decodes:
        return span.start_position >= max(position, span.request.n_prefill_tokens)
    return span.start_position <= position < end


def test_no_new_request_is_admitted_beside_a_suspect_on_trial() -> None:
    driver = LossyDriver(
        build(max_batch_size=4, n_blocks=40, block_size=4, pipeline_depth=2), [Arrival(0, 3, 9, 9)]
    )
    driver.arrive()
    suspect = request_for(1, Arrival(0, 3, 9, 9))
    suspect.n_losses = 2
    driver.scheduler.submit(suspect)
    first = driver.select()
    assert first is not None
    assert [span.request for span in first.spans] == [suspect]
    assert driver.scheduler.select() is None


def test_a_request_goes_on_after_the_tokens_that_it_came_with() -> None:
    scheduler = build(max_batch_size=4, n_blocks=8, block_size=4, pipeline_depth=1)
    request = request_for(0, Arrival(0, n_prompt=3, max_new_tokens=4, n_iterations=4))
    request.generated_token_ids = array(TOKEN_ID, [11, 12])
    scheduler.submit(request)
    batch = scheduler.select()
    assert batch is not None
    [span] = batch.spans
    assert (span.start_position, span.token_ids) == (0, [PLAIN_TOKEN] * 3 + [11, 12])
    assert span.is_sampled
    [update] = scheduler.apply(batch.iteration, [13])
    assert (update.token_id, update.finish_reason) == (13, None)
    batch = scheduler.select()
    assert batch is not None
    assert [(span.start_position, span.token_ids) for span in batch.spans] == [(5, [13])]
    [update] = scheduler.apply(batch.iteration, [14])
    assert update.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_by_itself", [False, True])
def test_all_suspects_go_on_at_once_after_a_loss_from_outside(is_by_itself: bool) -> None:
    driver = driver_of(3)
    driver.select()
    if is_by_itself:
        lose_by_itself(driver)
    else:
        driver.lose()
    batch = driver.select()
    assert batch is not None
    assert len(batch.spans) == (1 if is_by_itself else 3)


def test_after_two_losses_suspects_are_admitted_one_at_a_time_in_the_order_of_arrival() -> None:
    driver = driver_of(3)
    driver.select()
    driver.return_oldest()
    driver.select()
    driver.lose()
    driver.select()
    driver.lose()
    admitted = []
    for _ in range(5):
        batch = driver.select()
        assert batch is not None
        admitted.append([span.request.request_id for span in batch.spans if span.is_admission])
        driver.return_oldest()
    assert admitted == [["0"], [], ["1"], [], ["2"]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("suspicion", [0, 1])
def test_an_earlier_request_without_memory_does_not_hold_up_the_suspect_that_has_it(
    policy: str, suspicion: int
) -> None:
    scheduler = build(
        max_batch_size=4, n_blocks=5, block_size=4, pipeline_depth=1, policy=POLICIES[policy]
    )
    earlier, suspect = Arrival(0, 5, 9, 9), Arrival(0, 3, 9, 9)
    for index, (arrival, n_losses) in enumerate([(earlier, suspicion), (suspect, 2)]):
        request = request_for(index, arrival)
        request.n_losses = n_losses
        scheduler.submit(request)
    ends: list[str] = []
    while len(scheduler.pool):
        batch = scheduler.select()
        assert batch is not None
        sampled = [PLAIN_TOKEN for span in batch.spans if span.is_sampled]
        updates = scheduler.apply(batch.iteration, sampled)
        ends += [one.request.request_id for one in updates if one.finish_reason is not None]
    assert ends == ["1", "0"]


def test_a_request_that_no_longer_fits_fails_when_it_is_adopted() -> None:
    scheduler = build(max_batch_size=4, n_blocks=8, block_size=4, pipeline_depth=1)
    large = request_for(0, Arrival(0, n_prompt=10, max_new_tokens=9, n_iterations=9))
    small = request_for(1, Arrival(0, n_prompt=3, max_new_tokens=2, n_iterations=2))
    scheduler.submit(large)
    scheduler.submit(small)
    scheduler.suspend()
    smaller = build(max_batch_size=4, n_blocks=2, block_size=4, pipeline_depth=1)
    smaller.pool = scheduler.pool
    [update] = smaller.adopt()
    assert (update.request, update.finish_reason) == (large, FinishReason.FAILED)
    assert list(smaller.pool) == [small]


def lose_by_itself(driver: LossyDriver, iteration: int = 0) -> list[Update]:
    """Loses the epoch because a rank failed; returns the updates that end requests."""
    driver.in_flight.clear()
    _, ends = driver.scheduler.suspend(iteration, is_by_itself=True)
    driver.scheduler = next_epoch(driver.scheduler)
    return ends


def driver_of(n_requests: int, *, pipeline_depth: int = 1) -> LossyDriver:
    driver = LossyDriver(
        build(max_batch_size=4, n_blocks=40, block_size=4, pipeline_depth=pipeline_depth),
        [Arrival(0, 3, 9, 9)] * n_requests,
    )
    driver.arrive()
    return driver


def test_a_request_gets_no_third_try_after_two_ranks_failed_computing_it() -> None:
    driver = driver_of(3)
    assert driver.select()
    assert lose_by_itself(driver) == []
    assert driver.select(), "the first suspect, alone"
    [end] = lose_by_itself(driver)
    assert (end.request, end.finish_reason) == (driver.requests[0], FinishReason.FAILED)
    assert end.message == "a worker failed 2 times while it computed this request"
    assert [one.n_deaths for one in driver.scheduler.pool] == [1, 1]


def test_the_reason_is_true_if_a_node_died_between_two_failures_of_a_rank() -> None:
    driver = driver_of(1)
    assert driver.select()
    assert lose_by_itself(driver) == []
    assert driver.select()
    driver.lose()
    assert driver.select()
    [end] = lose_by_itself(driver)
    assert end.message == "a worker failed 2 times while it computed this request"


def test_a_rank_that_fails_once_and_nodes_that_die_condemn_nobody() -> None:
    driver = driver_of(1)
    assert driver.select()
    assert lose_by_itself(driver) == []
    driver.select()
    driver.lose()
    assert not driver.updates
    for _ in range(N_PROVING_TOKENS):
        assert driver.select()
        driver.return_oldest()
    [request] = driver.scheduler.pool
    assert (request.n_losses, request.n_deaths) == (0, 0)
    assert driver.select()
    assert lose_by_itself(driver) == [], "it has proved itself in between"


def test_only_the_requests_of_the_iteration_that_broke_off_are_suspects() -> None:
    policy = OrcaPolicy(max_batch_size=1)
    scheduler = build(max_batch_size=1, n_blocks=40, block_size=4, pipeline_depth=2, policy=policy)
    driver = LossyDriver(scheduler, [Arrival(0, 3, 9, 9)] * 2)
    driver.arrive()
    assert driver.select()
    second = driver.select()
    assert second is not None
    lose_by_itself(driver, second.iteration)
    assert [one.is_suspect for one in driver.scheduler.pool] == [False, True]
