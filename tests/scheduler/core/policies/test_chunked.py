"""The policy `chunked`: prompts in pieces, decodes never held up, even batches."""

from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.overhead import MAX_OVERHEAD_TOKENS, MIN_OVERHEAD_TOKENS
from services.scheduler.core.admission.prompt_groups import FIRST_OVERHEAD_TOKENS, PromptGroups
from services.scheduler.core.batch import Batch
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.invariants import (
    check_batches,
    check_ends,
    check_first_come_first_served,
    check_memory,
)
from tests.scheduler.core.workload import PLAIN_TOKEN, Arrival, Driver, arrivals, build, request_for

OVERHEADS = st.sampled_from([1, MIN_OVERHEAD_TOKENS, FIRST_OVERHEAD_TOKENS, MAX_OVERHEAD_TOKENS])


def chunked(
    *,
    max_batch_tokens: int,
    max_batch_size: int = 8,
    pipeline_depth: int = 2,
    token_hand_off: bool = True,
    n_blocks: int = 100,
    block_size: int = 4,
) -> Scheduler:
    """A scheduler as the leader builds it."""
    return build(
        max_batch_size=max_batch_size,
        n_blocks=n_blocks,
        block_size=block_size,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        policy=ChunkedPolicy(
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            n_shares=1 if token_hand_off else pipeline_depth,
        ),
    )


@given(
    requests=arrivals(with_cancellations=True),
    data=st.data(),
    max_batch_size=st.integers(1, 6),
    n_more_tokens=st.integers(0, 20),
    pipeline_depth=st.integers(1, 4),
    token_hand_off=st.booleans(),
    block_size=st.sampled_from([1, 4]),
    n_blocks=st.integers(6, 30),
)
def test_invariants_hold_whatever_arrives_and_is_cancelled(
    requests: list[Arrival],
    data: st.DataObject,
    max_batch_size: int,
    n_more_tokens: int,
    pipeline_depth: int,
    token_hand_off: bool,
    block_size: int,
    n_blocks: int,
) -> None:
    max_batch_tokens = max_batch_size + n_more_tokens
    scheduler = chunked(
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        n_blocks=n_blocks * 4 // block_size,
        block_size=block_size,
    )
    driver = Driver(scheduler, requests)
    n_iterations = dict.fromkeys(range(len(requests)), 0)
    while not driver.is_done:
        driver.arrive()
        scheduler.learn_overhead(data.draw(OVERHEADS))
        batch = driver.select()
        if batch is not None:
            check_batch(batch, max_batch_tokens=max_batch_tokens)
            for span in batch.spans:
                n_iterations[int(span.request.request_id)] += 1
        check_memory(driver)
        check_batches(driver, max_batch_size=max_batch_size)
        check_prompts_run_in_turn(driver)
        if token_hand_off:
            check_first_come_first_served(driver, n_iterations)
        if driver.in_flight and (batch is None or data.draw(st.booleans())):
            driver.return_oldest()
    check_ends(driver)


def check_batch(batch: Batch, *, max_batch_tokens: int) -> None:
    """Within the budget, in the order of arrival; of prompts only the last may be cut off."""
    assert sum(span.n_tokens for span in batch.spans) <= max_batch_tokens
    places = [span.request.arrival for span in batch.spans]
    assert places == sorted(places)
    assert all(span.is_sampled for span in batch.spans[:-1])


def check_prompts_run_in_turn(driver: Driver) -> None:
    """Nobody has begun before all of an earlier one's prompt was sent."""
    in_order = sorted(driver.scheduler.pool, key=lambda request: request.arrival)
    going = [request for request in in_order if not request.is_cancelled]
    for earlier, later in pairwise(going):
        if later.n_scheduled:
            assert earlier.n_scheduled >= earlier.n_prompt_tokens


@pytest.mark.parametrize("n_requests", [1, 5, 8, 16, 23])
@pytest.mark.parametrize("depth", [2, 3, 5])
def test_batches_in_flight_share_those_that_decode_evenly(n_requests: int, depth: int) -> None:
    n_new = 40
    arrivals = [Arrival(0, n_prompt=3, max_new_tokens=n_new, n_iterations=n_new)] * n_requests
    driver = Driver(
        chunked(
            max_batch_tokens=32, max_batch_size=32, pipeline_depth=depth, token_hand_off=False,
            n_blocks=1000,
        ),
        arrivals,
    )  # fmt: skip
    share = -(-n_requests // depth)
    riders: list[set[int]] = []
    while not driver.is_done:
        driver.arrive()
        while (batch := driver.select()) is not None:
            is_decoding = all(span.start_position >= 3 for span in batch.spans)
            if is_decoding and driver.scheduler.pool.n_running == n_requests:
                riders.append({span.request.arrival for span in batch.spans})
        driver.return_oldest()
    assert max(map(len, riders)) == share, "none takes more than its share"
    for i in range(len(riders) - 2 * depth):
        assert set.union(*riders[i : i + 2 * depth]) == set(range(n_requests)), "nobody starves"
    check_ends(driver)


def test_a_long_prompt_runs_in_pieces_beside_decodes_and_keeps_its_place() -> None:
    driver = Driver(
        chunked(max_batch_tokens=8),
        [Arrival(0, 4, 9, 9), Arrival(1, 18, 2, 2), Arrival(1, 3, 2, 2)],
    )
    shapes = []
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        if batch is not None:
            shapes.append([(s.request.arrival, s.n_tokens, s.is_sampled) for s in batch.spans])
        driver.return_oldest()
    assert shapes[:5] == [
        [(0, 4, True)],
        [(0, 1, True), (1, 7, False)],
        [(0, 1, True), (1, 7, False)],
        [(0, 1, True), (1, 4, True), (2, 3, True)],
        [(0, 1, True), (1, 1, True), (2, 1, True)],
    ]


def groups_of(
    n_prompts: int,
    n_tokens: int,
    *,
    max_batch_size: int = 64,
    overhead_tokens: int = FIRST_OVERHEAD_TOKENS,
) -> list[int]:
    """Returns how many prompts each batch begins with, of so many that come together; nobody
    decodes."""
    driver = Driver(
        chunked(max_batch_tokens=512, max_batch_size=max_batch_size, n_blocks=100_000),
        [Arrival(0, n_tokens, 1, 1)] * n_prompts,
    )
    driver.scheduler.learn_overhead(overhead_tokens)
    groups = []
    while not driver.is_done:
        driver.arrive()
        if (batch := driver.select()) is not None:
            groups.append(sum(span.start_position == 0 for span in batch.spans))
        driver.return_oldest()
    return groups


def mean_wait(groups: list[int], n_tokens: int, overhead_tokens: int) -> float:
    """Returns the time to the first token in the mean, in times of a token."""
    now, waits = 0.0, []
    for size in groups:
        now += overhead_tokens + size * n_tokens
        waits += [now] * size
    return mean(waits)


@pytest.mark.parametrize("n_prompts", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("n_tokens", [1, 4, 16, 28, 100])
@pytest.mark.parametrize("overhead_tokens", [8, 64, 512])
def test_prompts_that_come_together_have_their_first_tokens_nearly_as_soon_as_can_be(
    n_prompts: int, n_tokens: int, overhead_tokens: int
) -> None:
    groups = groups_of(n_prompts, n_tokens, overhead_tokens=overhead_tokens)
    assert sum(groups) == n_prompts
    if n_prompts * n_tokens <= 512:  # otherwise prompts are cut, which is not compared here
        even = [
            [size] * (n_prompts // size) + [n_prompts % size] * (n_prompts % size > 0)
            for size in range(1, n_prompts + 1)
        ]
        best = min(mean_wait(sizes, n_tokens, overhead_tokens) for sizes in even)
        assert mean_wait(groups, n_tokens, overhead_tokens) <= 1.1 * best


def test_few_prompts_run_in_groups_and_many_fill_the_batch() -> None:
    assert groups_of(16, 28) == [7, 5, 4]
    assert groups_of(3, 4) == [3]
    assert groups_of(100, 200)[0] == 3, "the last of them is cut"


def test_groups_are_larger_where_an_iteration_costs_more() -> None:
    assert groups_of(16, 28, overhead_tokens=8) == [3, 2, 2, 2, 2, 2, 1, 1, 1]
    assert groups_of(16, 28, overhead_tokens=512) == [16]


@pytest.mark.parametrize("n_waiting", [1, 3, 8, 40])
@pytest.mark.parametrize("n_tokens", [1, 5, 28, 100, 600])
@pytest.mark.parametrize("overhead_tokens", [8, 64, 512])
def test_a_line_takes_as_many_iterations_as_is_foretold(
    n_waiting: int, n_tokens: int, overhead_tokens: int
) -> None:
    scheduler = chunked(max_batch_tokens=256, max_batch_size=8, n_blocks=100_000, pipeline_depth=1)
    scheduler.learn_overhead(overhead_tokens)
    n_begun = n_done = n_iterations = 0
    while n_done < 40:
        while scheduler.pool.n_waiting < n_waiting:
            scheduler.submit(request_for(n_begun, Arrival(0, n_tokens, 1, 1)))
            n_begun += 1
        batch = scheduler.select()
        assert batch is not None
        n_done += len(scheduler.apply(batch.iteration, [PLAIN_TOKEN] * batch.n_sampled))
        n_iterations += 1
    groups = PromptGroups(max_batch_size=8, max_batch_tokens=256)
    groups.overhead_tokens = overhead_tokens
    foretold = groups.n_iterations(n_waiting, n_waiting * n_tokens, n_running=0)
    assert n_iterations / n_done == pytest.approx(foretold / n_waiting, rel=0.3)


def test_who_waits_for_a_place_is_no_reason_for_larger_groups() -> None:
    driver = Driver(
        chunked(max_batch_tokens=512, max_batch_size=6, n_blocks=1000),
        [Arrival(0, 1, 20, 20)] * 4 + [Arrival(1, 28, 2, 2)] * 30,
    )
    driver.arrive()
    assert driver.select() is not None
    driver.return_oldest()
    driver.arrive()
    batch = driver.select()
    assert batch is not None
    assert [span.n_tokens for span in batch.spans] == [1, 1, 1, 1, 28, 28]


@pytest.mark.parametrize("token_hand_off", [True, False])
def test_pieces_of_a_prompt_follow_each_other_without_waiting(token_hand_off: bool) -> None:
    scheduler = chunked(max_batch_tokens=8, pipeline_depth=3, token_hand_off=token_hand_off)
    scheduler.submit(request_for(0, Arrival(0, n_prompt=20, max_new_tokens=4, n_iterations=4)))
    batches = [scheduler.select() for _ in range(3)]
    spans = [batch.spans[0] for batch in batches if batch is not None]
    assert [(s.start_position, s.n_tokens, s.is_sampled) for s in spans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]
    for iteration, tokens in ((1, []), (2, []), (3, [PLAIN_TOKEN])):
        scheduler.apply(iteration, tokens)
    decode = scheduler.select()
    assert decode is not None
    assert decode.spans[0].token_ids == [PLAIN_TOKEN]


def test_a_request_cancelled_between_its_pieces_ends_with_the_first_and_goes_with_the_last() -> (
    None
):
    scheduler = chunked(max_batch_tokens=8)
    request: Request = request_for(0, Arrival(0, 20, 4, 4))
    scheduler.submit(request)
    for _ in range(2):
        assert scheduler.select() is not None
    scheduler.cancel(request)
    [update] = scheduler.apply(1, [])
    assert update.finish_reason is FinishReason.CANCELLED
    assert scheduler.kv_manager.n_reserved_slots > 0
    assert scheduler.apply(2, []) == []
    assert scheduler.kv_manager.n_reserved_slots == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_batch_size": 0, "max_batch_tokens": 8}, "max_batch_size"),
        ({"max_batch_size": 8, "max_batch_tokens": 7}, "max_batch_tokens"),
        ({"max_batch_size": 8, "max_batch_tokens": 8, "n_shares": 0}, "n_shares"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkedPolicy(**sizes)
