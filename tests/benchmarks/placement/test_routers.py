"""Routers choose as the load balancers and gateways do that they stand for."""

from dataclasses import dataclass

import pytest

from benchmarks.placement.routers import (
    POLL_S,
    ApproximatePrefix,
    LeastRequests,
    RoundRobin,
    SeenBlocks,
    block_hashes,
)
from services.scheduler.core.request import Request, RequestId

BLOCK_SIZE = 4


@dataclass
class FakeGroup:
    """A group whose load a test sets."""

    n_requests: int = 0
    n_waiting: int = 0
    kv_use: float = 0.0
    n_kv_blocks: int = 100


def request(*tokens: int) -> Request:
    return Request(RequestId("x"), list(tokens), 1)


def test_round_robin_gives_each_group_its_turn() -> None:
    router, groups = RoundRobin(), [FakeGroup(9), FakeGroup(), FakeGroup()]
    assert [router.choose(request(1), groups, 0.0) for _ in range(4)] == [0, 1, 2, 0]


def test_least_requests_looks_at_the_present() -> None:
    router, groups = LeastRequests(), [FakeGroup(2), FakeGroup(1)]
    assert router.choose(request(1), groups, 0.0) == 1
    groups[1].n_requests = 2
    assert router.choose(request(1), groups, 0.0) == 0


def test_a_block_is_known_by_all_tokens_before_its_end() -> None:
    one, other = block_hashes(request(*range(9)), 4), block_hashes(request(0, 9, *range(2, 9)), 4)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)
    assert block_hashes(request(0, 1, 2, 3, 7), 4) == one[:1]


def test_the_blocks_that_were_used_longest_ago_are_forgotten_and_of_a_prompt_the_last() -> None:
    seen = SeenBlocks(3)
    seen.add([1, 2])
    seen.add([3, 4])
    assert seen.n_found([1, 2]) == 1
    assert seen.n_found([3, 4]) == 2
    seen.add([1, 5, 6])
    assert seen.n_found([3, 4]) == 0


def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    router, groups = ApproximatePrefix(BLOCK_SIZE), [FakeGroup() for _ in range(4)]
    prompt = request(*range(16))
    chosen = router.choose(prompt, groups, 0.0)
    assert {router.choose(prompt, groups, 0.0) for _ in range(20)} == {chosen}


def test_load_outweighs_a_short_beginning() -> None:
    router, groups = ApproximatePrefix(BLOCK_SIZE), [FakeGroup(), FakeGroup()]
    first = router.choose(request(*range(16)), groups, 0.0)
    groups[first].n_waiting, groups[first].kv_use = 9, 0.9
    longer = request(*range(16), *range(100, 164))
    assert router.choose(longer, groups, POLL_S) == 1 - first


@pytest.mark.parametrize(("age_s", "is_seen"), [(0.9 * POLL_S, False), (POLL_S, True)])
def test_loads_are_as_old_as_the_last_reading(age_s: float, is_seen: bool) -> None:
    router, groups = ApproximatePrefix(BLOCK_SIZE), [FakeGroup(kv_use=0.1), FakeGroup(kv_use=0.2)]
    assert router.choose(request(1), groups, 0.0) == 0
    groups[0].kv_use = 0.9
    assert router.choose(request(1), groups, age_s) == int(is_seen)
