"""Optimistic admission: everybody ends with the tokens that he has with the paper's, nobody is put
down without end, and memory is never short."""

from dataclasses import dataclass
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.memory.expected_use import MAX_OWN_PREEMPTIONS, ExpectedUse
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import FinishReason, Request, RequestId, RequestState
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.stored import StoredTokens
from tests.scheduler.core.workload import build

BLOCK_SIZE = 2


def token_at(request: Request, position: int) -> int:
    """The token that a request generates: its own, so that none takes another's."""
    return (int(request.request_id) * 7 + position) % 90 + 5


def tokens_of(batch: Batch) -> list[int]:
    return [
        token_at(span.request, span.start_position + span.n_tokens)
        for span in batch.spans
        if span.is_sampled
    ]


def request_of(index: int, n_prompt: int, max_new_tokens: int, n_generated: int = 0) -> Request:
    """A request that ends with a stop token after `n_generated` tokens, if it is given."""
    request = Request(RequestId(str(index)), [1] * n_prompt, max_new_tokens)
    if n_generated:
        request.stop_token_ids = frozenset({token_at(request, n_prompt + n_generated - 1)})
    return request


def lender(share: float, *, n_blocks: int = 8, depth: int = 1, hand_off: bool = False) -> Scheduler:
    use = ExpectedUse()
    use.share = share
    return build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        pipeline_depth=depth,
        token_hand_off=hand_off,
        expected_use=use,
    )


def step(scheduler: Scheduler) -> list[str]:
    """Runs one iteration; returns who was in it."""
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, tokens_of(batch))
    return [span.request.request_id for span in batch.spans]


def test_a_request_reserves_its_tokens_and_the_share_that_others_use() -> None:
    use = ExpectedUse()
    request = request_of(0, n_prompt=4, max_new_tokens=40)
    use.learn(40, 40)
    assert use.share == (ExpectedUse.FIRST_GUESS + 1) / 2, "the guess counts as one request"
    for _ in range(200):
        use.learn(10, 40)
    assert use.n_tokens(request) in (10, 11), "a quarter, of which about half is held in the mean"
    request.n_preemptions = 1
    assert use.n_tokens(request) in (14, 15)
    use.share = 0.0
    request.n_preemptions = MAX_OWN_PREEMPTIONS
    assert use.n_tokens(request) == 44, "it is put down no more for its own needs"


def test_more_run_beside_each_other_than_could_be_reserved_for() -> None:
    requests = [request_of(index, 2, 10, n_generated=2) for index in range(4)]
    for scheduler, n_expected in ((lender(0.2), 4), (lender(1.0), 1)):
        for request in requests:
            scheduler.submit(request)
        assert len(step(scheduler)) == n_expected


def test_the_youngest_is_preempted_and_comes_back_before_others() -> None:
    scheduler = lender(0.0, n_blocks=6)
    old, young, waiting = (request_of(index, 4, 6) for index in range(3))
    for request in (old, young, waiting):
        scheduler.submit(request)
    assert step(scheduler) == ["0", "1", "2"]  # two blocks each
    assert step(scheduler) == ["0", "1"]  # one each, and the third is put down
    assert scheduler.take_preempted() == [waiting]
    assert waiting.state is RequestState.INITIATION
    late = request_of(3, 1, 1)
    scheduler.submit(late)
    order = []
    while len(scheduler.pool):
        order.append(step(scheduler))
    first = next(index for index, names in enumerate(order) if "2" in names)
    assert all("3" not in names for names in order[:first])
    assert young.n_preemptions == 1, "the oldest needs a fourth block"
    assert old.n_preemptions == 0
    for request in (old, young, waiting):
        assert list(request.generated_token_ids) == [token_at(request, at) for at in range(4, 10)]


def test_who_is_in_flight_is_preempted_when_it_returns_and_who_needs_it_waits() -> None:
    scheduler = lender(0.0, n_blocks=5, depth=2, hand_off=True)
    old, young = request_of(0, 4, 6), request_of(1, 6, 4)
    scheduler.submit(old)
    scheduler.submit(young)
    first = scheduler.select()
    assert first is not None
    assert [span.request for span in first.spans] == [old, young]
    assert scheduler.select() is None, "both need a block, and there is none"
    scheduler.apply(first.iteration, tokens_of(first))
    assert scheduler.take_preempted() == [young]
    assert list(young.generated_token_ids) == [token_at(young, 6)], "what it brought counts"
    second = scheduler.select()
    assert second is not None
    assert [span.request for span in second.spans] == [old]


def test_a_request_that_yields_may_end_or_be_cancelled_first() -> None:
    for is_cancelled in (False, True):
        scheduler = lender(0.0, n_blocks=5, depth=2, hand_off=True)
        old, young = request_of(0, 4, 6), request_of(1, 6, 4, n_generated=0 if is_cancelled else 1)
        scheduler.submit(old)
        scheduler.submit(young)
        batch = scheduler.select()
        assert batch is not None
        assert scheduler.select() is None
        if is_cancelled:
            scheduler.cancel(young)
        updates = scheduler.apply(batch.iteration, tokens_of(batch))
        reason = FinishReason.CANCELLED if is_cancelled else FinishReason.STOP
        assert [update.finish_reason for update in updates] == [None, reason]
        assert scheduler.take_preempted() == []
        while len(scheduler.pool):
            step(scheduler)
        assert scheduler.kv_manager.n_reserved_blocks == 0


@pytest.mark.parametrize(
    ("n_blocks", "n_prompts"), [(4, (1, 2)), (5, (1, 4)), (5, (2, 1)), (5, (3, 2)), (8, (5, 5))]
)
def test_the_least_important_is_preempted_though_it_came_first(
    n_blocks: int, n_prompts: tuple[int, int]
) -> None:
    use = ExpectedUse()
    use.share = 0.0
    scheduler = build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        pipeline_depth=1,
        order=Fair(ageing_s=1e9, now=lambda: 0.0),
        expected_use=use,
    )
    small, important = (request_of(index, n, 6) for index, n in enumerate(n_prompts))
    small.priority, important.priority = 1, -1
    scheduler.submit(small)
    step(scheduler)
    scheduler.submit(important)
    while len(scheduler.pool):
        step(scheduler)
    assert important.n_preemptions == 0
    assert len(small.generated_token_ids) == len(important.generated_token_ids) == 6


# Whatever comes


@dataclass(frozen=True)
class Coming:
    """A request to be, and when."""

    turn: int
    n_prompt: int
    max_new_tokens: int
    n_generated: int
    is_cancelled: bool
    priority: int


COMING = st.lists(
    st.builds(
        Coming,
        turn=st.integers(0, 15),
        n_prompt=st.integers(1, 8),
        max_new_tokens=st.integers(1, 16),
        n_generated=st.integers(0, 16),
        is_cancelled=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([-1, 0, 0, 1]),
    ),
    min_size=1,
    max_size=14,
)


class Watch:
    """What must hold, in every step, of a scheduler that lends."""

    def __init__(self, scheduler: Scheduler, n_blocks: int) -> None:
        self.scheduler = scheduler
        self.n_blocks = n_blocks
        self.first_admissions: list[int] = []
        self.beside: dict[Request, set[Request]] = {}

    def select(self) -> Batch | None:
        """Selects a batch, and looks who was put down for it."""
        pool = self.scheduler.pool
        before = list(pool.running)
        first = min(before, key=pool.order.rank, default=None)
        batch = self.scheduler.select()
        running = {*before, *pool.running}
        for request in running:
            self.beside.setdefault(request, set()).update(running)
        assert first not in self.scheduler.take_preempted(), "the first is never put down"
        for span in batch.spans if batch is not None else ():
            if span.is_admission and not span.request.n_preemptions:
                self.first_admissions.append(span.request.arrival)
        return batch

    def check(self, in_flight: list[Batch]) -> None:
        manager = self.scheduler.kv_manager
        on_board = {span.request for batch in in_flight for span in batch.spans}
        holders = [
            request.reservation
            for request in {*self.scheduler.pool, *on_board}
            if request.reservation is not None
        ]
        in_use = {block for one in holders for block in one.block_ids}
        n_outstanding = sum(one.n_reserved_blocks - len(one.block_ids) for one in holders)
        assert len(in_use) + n_outstanding == manager.n_reserved_blocks <= self.n_blocks
        assert manager.n_allocated_slots == len(in_use) * BLOCK_SIZE

    def check_bounds(self, requests: list[Request]) -> None:
        is_fair = isinstance(self.scheduler.pool.order, Fair)
        if not is_fair:
            assert self.first_admissions == sorted(self.first_admissions), (
                "first come, first served"
            )
        for request in requests:
            assert _n_failures(request) <= log2(self.n_blocks) + 2
            others = self.beside.get(request, set()) - {request}
            before = [one for one in others if is_fair or one.arrival < request.arrival]
            assert request.n_preemptions <= MAX_OWN_PREEMPTIONS + sum(map(_n_failures, before))


def _n_failures(request: Request) -> int:
    """Returns how often a request could not grow."""
    return 0 if not request.n_wanted_blocks else 1 + int(log2(request.n_wanted_blocks))


def _arrive(
    scheduler: Scheduler,
    coming: list[Coming],
    requests: list[Request],
    ended: dict[Request, FinishReason],
) -> None:
    """Lets requests in, and cancels some that came before them."""
    for one in coming:
        n_generated = min(one.n_generated, one.max_new_tokens)
        requests.append(request_of(len(requests), one.n_prompt, one.max_new_tokens, n_generated))
        requests[-1].priority = one.priority
        scheduler.submit(requests[-1])
        if one.is_cancelled and len(requests) > 1:
            _note_ends(scheduler.cancel(requests[-2]), ended)


def _note_ends(updates: list[Update], ended: dict[Request, FinishReason]) -> None:
    for update in updates:
        if update.finish_reason is not None:
            assert update.request not in ended
            ended[update.request] = update.finish_reason


@given(
    coming=COMING,
    data=st.data(),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    is_chunked=st.booleans(),
    token_hand_off=st.booleans(),
    has_prefix_cache=st.booleans(),
    is_fair=st.booleans(),
    pipeline_depth=st.integers(1, 4),
    n_blocks=st.integers(12, 30),
)
def test_everybody_ends_with_his_tokens_and_is_preempted_a_bounded_number_of_times(
    coming: list[Coming],
    data: st.DataObject,
    share: float,
    is_chunked: bool,
    token_hand_off: bool,
    has_prefix_cache: bool,
    is_fair: bool,
    pipeline_depth: int,
    n_blocks: int,
) -> None:
    use = ExpectedUse()
    use.share = share
    turn = 0
    scheduler = build(
        max_batch_size=5,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        policy=(
            ChunkedPolicy(max_batch_size=5, max_batch_tokens=8, n_shares=1 + pipeline_depth % 2)
            if is_chunked
            else OrcaPolicy(max_batch_size=5)
        ),
        order=Fair(ageing_s=3.0, now=lambda: float(turn)) if is_fair else None,
        has_prefix_cache=has_prefix_cache,
        expected_use=use,
    )
    watch = Watch(scheduler, n_blocks)
    memory = StoredTokens(token_at, block_size=BLOCK_SIZE)
    in_flight: list[Batch] = []
    requests: list[Request] = []
    ended: dict[Request, FinishReason] = {}
    for turn in range(1000):
        _arrive(scheduler, [one for one in coming if one.turn == turn], requests, ended)
        batch = watch.select()
        if batch is not None:
            memory.run(batch)
            in_flight.append(batch)
        assert batch is not None or in_flight or not len(scheduler.pool), "somebody always runs"
        watch.check(in_flight)
        if in_flight and (batch is None or data.draw(st.booleans())):
            returned = in_flight.pop(0)
            _note_ends(scheduler.apply(returned.iteration, tokens_of(returned)), ended)
            watch.check(in_flight)
        if turn > 15 and not len(scheduler.pool) and not in_flight:
            break
    assert ended.keys() == set(requests)
    assert scheduler.kv_manager.n_reserved_blocks == scheduler.kv_manager.n_allocated_slots == 0
    watch.check_bounds(requests)
    for request in requests:
        generated, first = list(request.generated_token_ids), request.n_prompt_tokens
        assert generated == [token_at(request, first + at) for at in range(len(generated))]


def drafting_lender(n_blocks: int) -> Scheduler:
    """A lender whose reservations grow ahead for drafts of up to two tokens, a block."""
    use = ExpectedUse()
    use.share = 0.0
    return build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        pipeline_depth=1,
        groups=BlockGroups(max_drafts=2),
        expected_use=use,
    )


def test_a_reservation_grows_ahead_for_drafts_while_memory_is_free() -> None:
    scheduler, request = drafting_lender(n_blocks=8), request_of(0, 4, 5)
    scheduler.submit(request)
    n_columns = []
    while len(scheduler.pool):
        step(scheduler)
        if request.reservation is not None:
            n_columns.append(request.reservation.n_reserved_columns)
    assert n_columns == [2, 4, 4, 5], "room for two drafts, and no more than the request can need"


def test_no_request_is_preempted_for_the_drafts_of_another() -> None:
    scheduler = drafting_lender(n_blocks=5)
    first, second = request_of(0, 3, 3), request_of(1, 4, 2)
    scheduler.submit(first)
    scheduler.submit(second)
    assert step(scheduler) == ["0", "1"]  # two blocks each
    assert step(scheduler) == ["0", "1"], "the second needs the last block, the first does not"
    assert scheduler.take_preempted() == []


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_preempted_requests_find_what_is_left_of_their_blocks(has_prefix_cache: bool) -> None:
    use = ExpectedUse()
    use.share = 0.0
    scheduler = build(
        max_batch_size=4,
        n_blocks=9,
        block_size=BLOCK_SIZE,
        pipeline_depth=1,
        has_prefix_cache=has_prefix_cache,
        expected_use=use,
    )
    requests = [request_of(index, 6, 6) for index in range(3)]
    for request in requests:
        request.cache_scope = request.request_id.encode()
        scheduler.submit(request)
    while len(scheduler.pool):
        step(scheduler)
    again = [request for request in requests if request.n_preemptions]
    assert again
    assert any(request.n_cached_tokens for request in again) == has_prefix_cache
