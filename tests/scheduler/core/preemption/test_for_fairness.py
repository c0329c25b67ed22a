"""Giving way: a client with less gets places and memory of one with more, and nobody loses a token
or waits for ever."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fair_batch import FairBatch
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request, RequestId, RequestState
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.stored import StoredTokens
from tests.scheduler.core.workload import build

BLOCK_SIZE = 2


def fair(batch: FairBatch | None = None) -> Fair:
    return Fair(ageing_s=30.0, now=lambda: 0.0, batch=batch)


class System:
    """A scheduler, its clients, and ranks that compute what they are told."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: list[Request] = []
        self.preempted: list[Request] = []
        self.in_flight: list[Batch] = []
        self._memory = StoredTokens(token_at, block_size=BLOCK_SIZE)
        self._accounts: dict[str, AccountUse] = {}

    def ask(
        self,
        client: str,
        n_prompt: int = 2,
        n_new: int = 6,
        *,
        priority: int = 0,
        weight: float = 1.0,
    ) -> Request:
        account = self._accounts.setdefault(
            client, AccountUse(AccountLimits(weight=weight), name=client)
        )
        request = Request(
            RequestId(f"{client}{len(self.requests)}"),
            [1] * n_prompt,
            n_new,
            account=account,
            priority=priority,
        )
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def select(self) -> list[Request]:
        """Selects a batch; returns who is in it."""
        batch = self.scheduler.select()
        self.preempted += self.scheduler.take_preempted()
        if batch is None:
            return []
        self._memory.run(batch)
        self.in_flight.append(batch)
        return [span.request for span in batch.spans]

    def apply(self) -> None:
        """Lets the oldest batch return."""
        batch = self.in_flight.pop(0)
        tokens = [
            token_at(span.request, span.start_position + span.n_tokens)
            for span in batch.spans
            if span.is_sampled
        ]
        self.scheduler.apply(batch.iteration, tokens)
        self.preempted += self.scheduler.take_preempted()

    def step(self) -> list[Request]:
        riding = self.select()
        self.apply()
        return riding

    def run_to_the_end(self) -> None:
        for _ in range(1000):
            if not len(self.scheduler.pool):
                break
            self.step()
        for request in self.requests:
            first = request.n_prompt_tokens
            assert list(request.generated_token_ids) == [
                token_at(request, first + at) for at in range(request.max_new_tokens)
            ]


def token_at(request: Request, position: int) -> int:
    """The token that a request generates: its own, so that none takes another's."""
    return (request.arrival * 7 + position) % 90 + 5


def system(
    *,
    n_places: int = 4,
    n_blocks: int = 1000,
    order: Order | None = None,
    depth: int = 1,
    max_rows: int | None = None,
) -> System:
    return System(
        build(
            max_batch_size=n_places,
            n_blocks=n_blocks,
            block_size=BLOCK_SIZE,
            pipeline_depth=depth,
            token_hand_off=depth > 1,
            order=fair() if order is None else order,
            max_rows=max_rows,
        )
    )


def test_who_has_nothing_gets_a_place_at_once_and_the_last_of_the_other_waits_with_its_memory() -> (
    None
):
    running = system()
    large = [running.ask("large", n_new=20) for _ in range(6)]
    assert running.step() == large[:4]
    small = running.ask("small")
    assert running.step() == [*large[:3], small]
    assert large[3].reservation is not None
    assert running.step() == [*large[:3], small], "and keeps it"
    while small.state is not RequestState.FINISHED:
        running.step()
    assert running.step() == large[:4], "who gave way comes before those that wait"
    assert not running.preempted
    running.run_to_the_end()


def test_first_come_first_served_gives_nobody_a_place() -> None:
    running = system(order=FirstComeFirstServed())
    large = [running.ask("large", n_new=20) for _ in range(4)]
    running.step()
    running.ask("small")
    assert running.step() == large


def test_a_client_gets_no_more_than_its_share() -> None:
    running = system()
    for _ in range(8):
        running.ask("large", n_new=50)
    running.step()
    for _ in range(8):
        running.ask("small", n_new=50)
    for _ in range(20):
        riding = running.step()
    assert [request.request_id[:5] for request in riding].count("small") == 2


def test_a_client_gets_a_share_by_its_weight() -> None:
    running = system(n_places=8)
    for _ in range(12):
        running.ask("light", n_new=50)
    running.step()
    for _ in range(12):
        running.ask("heavy", n_new=50, weight=3.0)
    for _ in range(20):
        riding = running.step()
    assert [request.request_id[:5] for request in riding].count("heavy") == 6


def test_the_place_that_is_given_is_before_a_long_prompt_and_not_behind_it() -> None:
    running = System(
        build(
            max_batch_size=8,
            n_blocks=6000,
            block_size=BLOCK_SIZE,
            pipeline_depth=1,
            policy=ChunkedPolicy(max_batch_size=8, max_batch_tokens=16),
            order=fair(),
        )
    )
    large = [running.ask("large", n_new=100) for _ in range(3)]
    running.step()
    large.append(running.ask("large", n_prompt=800))
    running.step()
    long = running.ask("heavy", n_prompt=800, weight=100.0)
    assert running.step() == [*large[:3], long], "it has the place of the last one"
    for _ in range(3):
        running.step()
    small = running.ask("small")
    assert small in running.step()
    assert running.step() == [*large[:2], small, long, large[2]], "whose stream goes on"
    running.run_to_the_end()


def test_nobody_gives_way_to_one_who_matters_less() -> None:
    running = system()
    large = [running.ask("large", n_new=20) for _ in range(4)]
    running.step()
    running.ask("small", priority=1)
    assert running.step() == large


@pytest.mark.parametrize("depth", [1, 2])
def test_memory_is_taken_from_the_last_of_the_other_and_given_back_later(depth: int) -> None:
    running = system(n_blocks=16, depth=depth)  # each needs four blocks
    large = [running.ask("large") for _ in range(5)]
    running.select()
    small = running.ask("small")
    while small.state is RequestState.INITIATION:
        running.apply()
        running.select()
    assert running.preempted == [large[3]]
    assert large[3].generated_token_ids, "it was put down for what it had cost"
    assert large[4].state is RequestState.INITIATION
    while running.in_flight:
        running.apply()
    running.run_to_the_end()
    assert running.preempted == [large[3]], "it did not come back before it could stay"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_is_taken_from_the_last_of_the_other_where_there_is_no_more(depth: int) -> None:
    running = system(max_rows=3, depth=depth)
    large = [running.ask("large", n_new=20) for _ in range(5)]
    assert running.step() == large[:3]
    small = running.ask("small")
    for _ in range(8):
        riding = running.step()
    assert small.state is RequestState.FINISHED
    assert set(running.preempted) == {large[2]}
    assert len(riding) <= 3
    running.run_to_the_end()


def test_nobody_is_preempted_where_that_is_not_enough() -> None:
    running = system(n_blocks=16)
    for _ in range(4):
        running.ask("large")
    running.step()
    running.ask("small", n_prompt=2, n_new=28)
    running.run_to_the_end()
    assert not running.preempted


def test_who_is_called_may_be_cancelled() -> None:
    running = system(n_blocks=16, depth=2)
    large = [running.ask("large") for _ in range(4)]
    running.select()
    running.select()
    small = running.ask("small")
    running.apply()
    assert running.select() == large[:3], "the last one is to be put down when it returns"
    running.scheduler.cancel(small)
    running.apply()
    running.apply()
    assert not running.preempted
    assert running.select() == large
    running.apply()
    running.requests.remove(small)
    running.run_to_the_end()


# Whatever comes


@dataclass(frozen=True)
class Coming:
    """A request to be, and when."""

    turn: int
    client: str
    n_prompt: int
    n_new: int
    priority: int
    is_cancelled: bool


COMING = st.lists(
    st.builds(
        Coming,
        turn=st.integers(0, 15),
        client=st.sampled_from(["a", "a", "a", "b", "c"]),
        n_prompt=st.integers(1, 8),
        n_new=st.integers(1, 14),
        priority=st.sampled_from([0, 0, 0, 0, 1]),
        is_cancelled=st.sampled_from([False, False, False, True]),
    ),
    min_size=8,
    max_size=30,
)
WAYS = {
    "coming": COMING,
    "data": st.data(),
    "share": st.sampled_from([None, 0.0, 0.3, 1.0]),
    "is_chunked": st.booleans(),
    "fair_tokens": st.sampled_from([None, 1, 3]),
    "has_prefix_cache": st.booleans(),
    "depth": st.integers(1, 3),
    "hand_off": st.booleans(),
    "n_blocks": st.integers(11, 26),
    "max_rows": st.sampled_from([None, None, 1, 2, 5]),
}


def serve_all(
    coming: list[Coming],
    data: st.DataObject,
    share: float | None,
    is_chunked: bool,
    fair_tokens: int | None,
    has_prefix_cache: bool,
    depth: int,
    hand_off: bool,
    n_blocks: int,
    max_rows: int | None,
) -> None:
    """Serves requests to their ends; checks that somebody always runs, that all get their tokens,
    and how often they are put down."""
    use = None if share is None else ExpectedUse()
    if use is not None:
        use.share = share or 0.0
    running = System(
        build(
            max_batch_size=4,
            n_blocks=n_blocks,
            block_size=BLOCK_SIZE,
            pipeline_depth=depth,
            token_hand_off=hand_off,
            policy=(
                ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
                if is_chunked
                else OrcaPolicy(max_batch_size=4)
            ),
            order=fair(None if fair_tokens is None else FairBatch(fair_tokens)),
            has_prefix_cache=has_prefix_cache,
            expected_use=use,
            max_rows=max_rows,
        )
    )
    scheduler, cancelled = running.scheduler, set[Request]()
    for turn in range(2000):
        for one in coming:
            if one.turn == turn:
                running.ask(one.client, one.n_prompt, one.n_new, priority=one.priority)
                if one.is_cancelled and len(running.requests) > 1:
                    scheduler.cancel(running.requests[-2])
                    cancelled.add(running.requests[-2])
        riding = running.select()
        assert riding or running.in_flight or not len(scheduler.pool), "somebody always runs"
        assert scheduler.kv_manager.n_reserved_blocks <= n_blocks
        rows = [one.reservation.row for one in running.requests if one.reservation is not None]
        assert max_rows is None or max(rows, default=0) < max_rows
        places = [request.place for request in scheduler.pool.running]
        assert len(places) == len(set(places))
        if running.in_flight and (not riding or data.draw(st.booleans())):
            running.apply()
        if turn > 15 and not len(scheduler.pool) and not running.in_flight:
            break
    assert not len(scheduler.pool)
    assert scheduler.kv_manager.n_reserved_blocks == scheduler.kv_manager.n_allocated_slots == 0
    assert all(request.client and not request.client.n_running for request in running.requests)
    for request in running.requests:
        generated, first = list(request.generated_token_ids), request.n_prompt_tokens
        assert generated == [token_at(request, first + at) for at in range(len(generated))]
        assert request in cancelled or len(generated) == request.max_new_tokens
    if share is None:
        # For each that is admitted for the first time others were put down once, if at all.
        assert len(running.preempted) <= len(running.requests) * 4


@given(**WAYS)
def test_everybody_ends_with_his_tokens_whoever_gives_way(**ways: Any) -> None:
    serve_all(**ways)
