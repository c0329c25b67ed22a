"""Request-level scheduling as it is compared with: whole batches, nothing before all are done."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.order import Order
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.request_level import RequestLevelPolicy
from services.scheduler.core.request import FinishReason
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.whole_batches import WholeBatchScheduler
from tests.scheduler.core.workload import Arrival, Driver, arrivals


def request_level(
    *,
    max_batch_size: int = 2,
    microbatch_size: int | None = None,
    n_groups: int = 1,
    pipeline_depth: int = 2,
    token_hand_off: bool = True,
    n_blocks: int = 100,
    order: Order | None = None,
    expected_use: ExpectedUse | None = None,
) -> WholeBatchScheduler:
    return WholeBatchScheduler(
        RequestPool(max_requests=100, order=order),
        KVManager(n_blocks=n_blocks, block_size=4, expected_use=expected_use),
        policy=CheckedPolicy(
            RequestLevelPolicy(
                PolicyOptions(max_batch_size, n_shares=n_groups), microbatch_size=microbatch_size
            )
        ),
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
    )


def iterations(driver: Driver) -> list[list[int]]:
    """Runs everything; who rode each iteration."""
    riders = []
    while not driver.is_done:
        driver.arrive()
        while (batch := driver.select()) is not None:
            riders.append([int(span.request.request_id) for span in batch.spans])
        if driver.in_flight:
            driver.return_oldest()
    return riders


def test_late_ones_wait_for_the_whole_batch_and_early_ones_return_with_it() -> None:
    driver = Driver(
        request_level(pipeline_depth=1),
        [Arrival(0, 3, 1, 1), Arrival(0, 3, 3, 3), Arrival(1, 3, 1, 1)],
    )
    assert iterations(driver) == [[0, 1], [1], [1], [2]]
    told = [update.request.request_id for update in driver.updates]
    assert told == ["0", "1", "1", "1", "2"]
    driver = Driver(request_level(pipeline_depth=1), driver.arrivals)
    for n_told in (0, 0, 4, 5):
        driver.arrive()
        assert driver.select() is not None
        driver.return_oldest()
        assert len(driver.updates) == n_told


def test_microbatches_of_a_batch_are_in_flight_together_and_the_next_batch_waits_for_all() -> None:
    arrivals = [Arrival(0, 3, n, n) for n in (2, 2, 1, 3, 1)]
    driver = Driver(
        request_level(max_batch_size=4, microbatch_size=2, pipeline_depth=3, token_hand_off=False),
        arrivals,
    )
    assert iterations(driver) == [[0, 1], [2, 3], [0, 1], [3], [3], [4]]


def test_several_batches_run_at_a_time_if_told_so() -> None:
    driver = Driver(
        request_level(n_groups=2, token_hand_off=False), [Arrival(0, 3, 2, 2) for _ in range(5)]
    )
    assert iterations(driver) == [[0, 1], [2, 3], [0, 1], [2, 3], [4], [4]]


def test_a_batch_goes_on_while_a_request_of_another_client_is_called() -> None:
    order = Fair(ageing_s=1e9, now=lambda: 0.0)
    driver = Driver(
        request_level(order=order, token_hand_off=False, pipeline_depth=1),
        [Arrival(turn, 3, n, n, client=client) for turn, n, client in ((0, 4, "a"), (0, 4, "a"))]
        + [Arrival(1, 3, 2, 2, client="b")],
    )
    assert iterations(driver) == [[0, 1]] * 4 + [[2], [2]]


def test_preempted_requests_of_two_batches_return_in_order() -> None:
    use = ExpectedUse()
    use.share = 0.0
    driver = Driver(
        request_level(
            n_groups=2, n_blocks=6, token_hand_off=False, pipeline_depth=2, expected_use=use
        ),
        [Arrival(0, n_prompt, 20, 20) for n_prompt in (3, 4, 2)],
    )
    iterations(driver)  # the policy is checked
    assert sum(one.n_preemptions for one in driver.requests.values()) > 1


@given(
    requests=arrivals(with_cancellations=True),
    max_batch_size=st.integers(1, 6),
    microbatch_size=st.none() | st.integers(1, 3),
    n_groups=st.integers(1, 3),
    pipeline_depth=st.integers(1, 4),
    token_hand_off=st.booleans(),
    n_blocks=st.integers(6, 30),
)
def test_every_request_ends_once_and_nothing_is_leaked(
    requests: list[Arrival],
    max_batch_size: int,
    microbatch_size: int | None,
    n_groups: int,
    pipeline_depth: int,
    token_hand_off: bool,
    n_blocks: int,
) -> None:
    scheduler = request_level(
        max_batch_size=max_batch_size,
        microbatch_size=microbatch_size,
        n_groups=n_groups,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        n_blocks=n_blocks,
    )
    driver = Driver(scheduler, requests)
    for riders in iterations(driver):
        assert len(riders) <= (microbatch_size or max_batch_size)
    while driver.in_flight:
        driver.return_oldest()
    assert scheduler.select() is None
    assert scheduler.kv_manager.n_reserved_slots == 0
    for index, request in driver.requests.items():
        mine = [update for update in driver.updates if update.request is request]
        ends = [update.finish_reason for update in mine if update.finish_reason is not None]
        assert len(ends) == 1
        tokens = [update for update in mine if update.token_id is not None]
        assert [update.token_id for update in tokens] == list(request.generated_token_ids)
        assert [update.n_generated for update in tokens] == list(range(1, len(tokens) + 1))
        if ends != [FinishReason.CANCELLED]:
            assert len(request.generated_token_ids) == driver.arrivals[index].n_iterations
