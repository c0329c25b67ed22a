"""The fair order over several pipelines: VTC's bound, and the limits of clients in batches."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fair_batch import FairBatch
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from tests.scheduler.core.test_several_pipelines import BLOCK_SIZE, POLICIES, Site

N_BLOCKS, MAX_PROMPT = 12, 12


def accounts_of(*weights: float) -> list[AccountUse]:
    return [AccountUse(AccountLimits(weight=one), name=str(n)) for n, one in enumerate(weights)]


def busy_beside_idle(*, batch_tokens: int | None) -> tuple[Site, AccountUse, AccountUse]:
    """Two pipelines: the first runs three requests of one client and one of another, and has cached
    the beginning of all prompts; the second is empty. Returns also the accounts of the clients."""
    batch = None if batch_tokens is None else FairBatch(batch_tokens)
    site = Site(
        2,
        order=Fair(ageing_s=1.0, now=lambda: 0.0, batch=batch),
        policy=lambda: ChunkedPolicy(max_batch_size=8, max_batch_tokens=200),
        n_blocks=400,
    )
    first, second = site.lines
    site.open(first)
    many, few = accounts_of(1.0, 1.0)
    for account in (many, many, many, few):
        site.submit(120, 100, account)
        site.return_oldest(first)
        site.return_oldest(first)
    site.open(second)
    return site, many, few


def client_of(site: Site, account: AccountUse) -> ServedClient:
    [client] = {one.client for one in site.requests if one.account is account}
    assert client is not None
    return client


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, MAX_PROMPT)), min_size=40, max_size=80
    ),
    weight=st.sampled_from((1.0, 3.0)),
    n_pipelines=st.integers(2, 3),
    policy=st.sampled_from(POLICIES),
    batch_tokens=st.none() | st.integers(1, 3),
    depths=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_two_clients_differ_by_the_bound_over_all_pipelines(
    arrivals: list[tuple[int, int]],
    weight: float,
    n_pipelines: int,
    policy: Callable[[], Policy],
    batch_tokens: int | None,
    depths: list[int],
    seed: int,
) -> None:
    """The bound is `2 max(w_p n_prompt, w_q n_slots)`, with the K/V slots of all pipelines, however
    fast each pipeline is, and also when pipelines are lost and form again."""
    random = Random(seed)
    batch = None if batch_tokens is None else FairBatch(batch_tokens)
    order = Fair(ageing_s=1.0, now=lambda: 0.0, batch=batch)
    site = Site(n_pipelines, order=order, policy=policy, n_blocks=N_BLOCKS)
    for line, depth in zip(site.lines, depths, strict=False):
        site.open(line, depth=depth)
    accounts = accounts_of(1.0, weight)
    for account in accounts:
        site.submit(1, 4, account)
    for client, n_prompt in arrivals:
        site.submit(n_prompt, 4, accounts[client])
    one, two = (client_of(site, account) for account in accounts)
    n_slots = n_pipelines * N_BLOCKS * BLOCK_SIZE
    bound = 2 * max(
        max(client.prompt_charge(MAX_PROMPT), client.output_charge * n_slots)
        for client in (one, two)
    )
    speeds = [random.random() for _ in site.lines]
    while one.n_waiting and two.n_waiting:
        assert abs(one.served - two.served) <= bound
        busy = [number for number, line in enumerate(site.lines) if line.in_flight]
        [number] = random.choices(busy, [speeds[number] for number in busy])
        site.return_oldest(site.lines[number])
        if random.random() < 0.05:
            lost = random.choice(site.lines)
            site.lose(lost) if len(site.serving) > 1 and lost.core else None
        for line, depth in zip(site.lines, depths, strict=False):
            if line.core is None and random.random() < 0.2:
                site.open(line, depth=depth)
    site.run()
    assert not site.requests_left


@pytest.mark.parametrize("batch_tokens", [None, 2])
def test_no_request_is_left_to_a_pipeline_that_limits_its_client(batch_tokens: int | None) -> None:
    """The pipeline with the beginning may have it, but only if its client may have one more
    there."""
    site, many, _ = busy_beside_idle(batch_tokens=batch_tokens)
    site.submit(120, 50, many)
    site.return_oldest(site.lines[0])
    n_running = [len(line.pool.running) for line in site.lines]
    assert n_running == ([5, 0] if batch_tokens is None else [4, 1])


def test_requests_of_a_client_take_turns_in_each_pipeline() -> None:
    site, many, few = busy_beside_idle(batch_tokens=2)
    for account in (many, many, few):
        site.submit(1, 100, account)
        for line in site.lines:
            if line.in_flight:
                site.return_oldest(line)
    assert [len(line.pool.running) for line in site.lines] == [4, 3]
    for line in site.lines:
        limited = [one for one in line.pool.running if one.account is many]
        n_before = [len(site.outputs[one]) for one in limited]
        for _ in range(30):
            for each in site.lines:
                site.return_oldest(each)
        n_new = [len(site.outputs[one]) - n for one, n in zip(limited, n_before, strict=True)]
        assert max(n_new) - min(n_new) <= 1, "one after the other"


@pytest.mark.parametrize("has_places", [True, False])
def test_places_in_another_pipeline_count_as_places(has_places: bool) -> None:
    """A client takes a place from another only if it has fewer, in all pipelines together."""
    site = Site(
        2,
        order=Fair(ageing_s=1.0, now=lambda: 0.0),
        policy=lambda: ChunkedPolicy(max_batch_size=4, max_batch_tokens=100),
        n_blocks=100,
    )
    first, second = site.lines
    one, two, three = accounts_of(1.0, 1.0, 1.0)
    site.open(first)
    for _ in range(4):
        site.submit(1, 60, one if has_places else three)
    site.return_oldest(first)
    site.return_oldest(first)
    site.open(second)
    for _ in range(4):
        site.submit(40, 20, two)
    for _ in range(3):
        site.return_oldest(second)
    assert [len(line.pool.running) for line in site.lines] == [4, 4]
    site.submit(1, 5, one)
    for _ in range(4):
        site.return_oldest(second)
    assert (site.requests[-1] in second.pool.running) is not has_places
