"""Each policy of the gallery does what its paper says, and keeps the rules on random arrivals."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.order.by_key import OrderByKey
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.aging import TOKENS_PER_ARRIVAL
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.registry import POLICIES
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.invariants import check_batches, check_ends, check_memory
from tests.scheduler.core.workload import Arrival, Driver, arrivals, build


class Told:
    """A predictor that knows all lengths, which requests ask for."""

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        assert n_generated == max_new_tokens

    def n_left(self, request: Request) -> float:
        return request.max_new_tokens - len(request.generated_token_ids)


def scheduler(
    name: str,
    *,
    max_batch_size: int = 2,
    max_batch_tokens: int | None = 8,
    pipeline_depth: int = 1,
    token_hand_off: bool = False,
    n_blocks: int = 1000,
    is_told: bool = True,
    expected_use: ExpectedUse | None = None,
) -> Scheduler:
    options = PolicyOptions(
        max_batch_size,
        max_batch_tokens,
        1 if token_hand_off else pipeline_depth,
        Told() if is_told else None,
    )
    return build(
        max_batch_size=max_batch_size,
        n_blocks=n_blocks,
        block_size=1,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        policy=CheckedPolicy(POLICIES[name].of(options)),
        expected_use=expected_use,
    )


def batches(system: Scheduler, requests: Sequence[tuple[int, int, int]]) -> list[dict[int, int]]:
    """Runs requests, each given by its turn and the lengths of prompt and output. Returns the
    tokens of each request in each iteration."""
    driver = Driver(system, [Arrival(turn, n, n_out, n_out) for turn, n, n_out in requests])
    found = []
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        if batch is not None:
            found.append(tokens_of(batch))
            driver.return_oldest()
    check_ends(driver)
    return found


def tokens_of(batch: Batch) -> dict[int, int]:
    return {int(span.request.request_id): span.n_tokens for span in batch.spans}


@pytest.mark.parametrize("name", POLICIES)
@given(
    requests=arrivals(with_cancellations=True, n_requests=10),
    data=st.data(),
    max_batch_size=st.integers(1, 5),
    pipeline_depth=st.integers(1, 3),
    token_hand_off=st.booleans(),
    n_blocks=st.integers(21, 60),
    is_optimistic=st.booleans(),
)
def test_rules_hold_and_every_request_ends(
    name: str,
    requests: list[Arrival],
    data: st.DataObject,
    max_batch_size: int,
    pipeline_depth: int,
    token_hand_off: bool,
    n_blocks: int,
    is_optimistic: bool,
) -> None:
    system = scheduler(
        name,
        max_batch_size=max_batch_size,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        n_blocks=n_blocks,
        is_told=False,
        expected_use=ExpectedUse() if is_optimistic else None,
    )
    driver = Driver(system, [replace(one, scope=b"") for one in requests])
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        check_memory(driver)
        check_batches(driver, max_batch_size=max_batch_size)
        if driver.in_flight and (batch is None or data.draw(st.booleans())):
            driver.return_oldest()
    check_ends(driver)


def test_orca_runs_a_prompt_whole_and_lets_requests_join_between_iterations() -> None:
    found = batches(scheduler("orca"), [(0, 20, 3), (1, 5, 1)])
    assert found == [{0: 20}, {0: 1, 1: 5}, {0: 1}]


def test_chunked_runs_a_prompt_beside_decodes_within_its_budget() -> None:
    found = batches(scheduler("chunked"), [(0, 4, 4), (1, 15, 1)])
    assert found == [{0: 4}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 1}]


def test_sarathi_runs_decodes_before_begun_prompts_and_these_before_new_ones() -> None:
    system = scheduler("sarathi", max_batch_size=3)
    found = batches(system, [(0, 6, 6), (1, 10, 2), (2, 3, 1)])
    # Request 1 takes what decode 0 leaves, and request 2 begins with what is left behind 1.
    assert found[:3] == [{0: 6}, {0: 1, 1: 7}, {0: 1, 1: 3, 2: 3}]
    assert all(batch.get(0, 1) == 1 for batch in found[1:6]), "no decode is stalled"


def test_sarathi_begins_as_many_prompts_as_fit() -> None:
    # `chunked` begins them in groups: its first batch has one prompt.
    assert batches(scheduler("sarathi"), [(0, 3, 1), (0, 3, 1)]) == [{0: 3, 1: 3}]
    assert batches(scheduler("sarathi", max_batch_size=8), [(0, 5, 1), (0, 5, 1)])[0] == {
        0: 5,
        1: 3,
    }


def test_shortest_lets_a_short_request_take_the_place_of_a_long_one_that_runs() -> None:
    system = scheduler("shortest", max_batch_size=1)
    found = batches(system, [(0, 2, 9), (2, 2, 3), (3, 2, 1)])
    assert [next(iter(batch)) for batch in found] == [0, 0, 1, 2, 1, 1] + [0] * 7
    assert found[6:] == [{0: 1}] * 7, "the long one goes on without a new prefill"


def test_shortest_learns_lengths_from_requests_that_have_ended() -> None:
    system = scheduler("shortest", max_batch_size=1, is_told=False, n_blocks=100)
    # Requests that ask for up to 9 tokens have generated 9, and requests that ask for 3 have 1.
    learning = [Arrival(0, 1, 9, 9)] * 8 + [Arrival(0, 1, 3, 1)] * 8
    driver = Driver(system, [*learning, Arrival(300, 1, 9, 9), Arrival(300, 1, 3, 1)])
    first: list[int] = []
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        if batch is not None:
            first += [one for one in tokens_of(batch) if one >= len(learning)]
            driver.return_oldest()
    assert first[0] == len(learning) + 1, "the later one is expected to be shorter"


def overtaken(name: str) -> int:
    """Returns how many short requests run before a long one, if a short one arrives each turn."""
    system = scheduler(name, max_batch_size=1)
    n_long = 20
    found = batches(system, [(0, 1, n_long), *((turn, 1, 1) for turn in range(40))])
    order = [next(iter(batch)) for batch in found]
    return len(set(order[: order.index(0)]))


def test_shortest_lets_a_long_request_starve_and_aging_bounds_its_wait() -> None:
    assert overtaken("shortest") == 40
    assert 0 < overtaken("aging") <= 20 // TOKENS_PER_ARRIVAL


def test_request_level_begins_nothing_before_its_batch_is_complete() -> None:
    found = batches(scheduler("request_level"), [(0, 3, 1), (0, 3, 3), (1, 3, 1)])
    assert found == [{0: 3, 1: 3}, {1: 1}, {1: 1}, {2: 3}]


def test_batchmaker_batches_only_equal_positions() -> None:
    assert batches(scheduler("batchmaker"), [(0, 4, 2), (0, 4, 2)]) == [{0: 4, 1: 4}, {0: 1, 1: 1}]
    alone = batches(scheduler("batchmaker"), [(0, 4, 2), (0, 5, 2)])
    assert all(len(batch) == 1 for batch in alone)


def test_faster_transformer_computes_long_prompts_token_by_token_and_waits_for_the_batch() -> None:
    found = batches(scheduler("faster_transformer"), [(0, 3, 1), (0, 5, 2), (1, 2, 1)])
    assert found == [{0: 3, 1: 3}, {1: 1}, {1: 1}, {1: 1}, {2: 2}]


def test_faster_transformer_has_a_microbatch_for_each_stage() -> None:
    system = scheduler("faster_transformer", max_batch_size=4, pipeline_depth=2)
    driver = Driver(system, [Arrival(0, 2, 2, 2)] * 5)
    driver.arrive()
    sent = [driver.select(), driver.select(), driver.select()]
    assert [batch and list(tokens_of(batch)) for batch in sent] == [[0, 1], [2, 3], None]


class Longest(OrderByKey):
    """An order that admits the longest prompt first."""

    name = "longest"

    def key(self, request: Request) -> float:
        return -request.n_prompt_tokens


def test_an_order_by_a_key_is_a_few_lines() -> None:
    system = build(max_batch_size=1, n_blocks=99, block_size=1, pipeline_depth=1, order=Longest())
    found = batches(system, [(0, 2, 1), (0, 9, 1), (0, 5, 1), (0, 9, 1)])
    assert [next(iter(batch)) for batch in found] == [1, 3, 2, 0]


def test_a_preempted_request_comes_before_all_others_in_an_order_by_a_key() -> None:
    order = Longest()
    system = build(max_batch_size=2, n_blocks=99, block_size=1, pipeline_depth=1, order=order)
    driver = Driver(system, [Arrival(0, 1, 5, 5), Arrival(1, 9, 1, 1)])
    driver.arrive()
    driver.select()
    driver.return_oldest()
    driver.arrive()
    system.pool.preempt_all()
    assert [one.request_id for one in order] == ["0", "1"]
    assert len(order) == 2
    system.cancel(driver.requests[0])
    system.cancel(driver.requests[1])
    assert not len(order)
