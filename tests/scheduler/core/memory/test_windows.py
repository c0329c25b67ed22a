"""K/V groups with windows: memory comes back behind the window, and never what somebody reads.

A model of the ranks holds the scheduler to it. It keeps the contents of every block and runs
batches in their order: it writes what all spans of a batch compute, then looks whether every query
finds all the keys that it sees.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.drafting.drafter import Drafter, n_leading_equal
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.prefix_cache import PrefixCache
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation
from tests.scheduler.core.workload import (
    PLAIN_TOKEN,
    STOP_TOKEN,
    Arrival,
    Driver,
    arrivals,
)

GARBAGE = 3


class GroupedMemory:
    """The K/V of all groups, as a rank has them."""

    def __init__(self, groups: BlockGroups, *, block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._slots: dict[int, tuple[int, bytes | None, tuple[int, ...]]] = {}
        self._tables: dict[Request, list[list[int]]] = {}

    def run(self, batch: Batch, token_at: "TokenAt") -> None:
        """Writes what the spans of a batch compute, and checks what they read."""
        windows = self._groups.windows
        for span in batch.spans:
            self._extend_tables(span)
            for group in range(len(windows)):
                for at, content in self._contents(span, group, span.start_position, token_at):
                    self._slots[self._slot(span, group, at)] = content
        for span in batch.spans:
            for group, window in enumerate(windows):
                first = 0 if window is None else max(0, span.start_position - window + 1)
                for at, content in self._contents(span, group, first, token_at):
                    assert self._slots.get(self._slot(span, group, at)) == content

    def tear(self, batch: Batch, is_torn: Callable[[], bool]) -> None:
        """Leaves nonsense in those slots that a batch would write for which `is_torn` says so."""
        for span in batch.spans:
            self._extend_tables(span)
            for group in range(len(self._groups.windows)):
                for at in range(span.start_position, span.start_position + span.n_tokens):
                    if is_torn():
                        self._slots[self._slot(span, group, at)] = (group, b"nonsense", ())

    def _extend_tables(self, span: Span) -> None:
        windows = self._groups.windows
        tables = self._tables.setdefault(span.request, [])
        if span.is_admission:
            tables[:] = [[] for _ in windows]
        n_new = len(span.new_block_ids) // len(windows)
        assert n_new * len(windows) == len(span.new_block_ids)
        for group, table in enumerate(tables):
            table += span.new_block_ids[group * n_new : (group + 1) * n_new]

    def _slot(self, span: Span, group: int, at: int) -> int:
        block_id = self._tables[span.request][group][at // self._block_size]
        return block_id * self._block_size + at % self._block_size

    def _contents(
        self, span: Span, group: int, first: int, token_at: "TokenAt"
    ) -> list[tuple[int, tuple[int, bytes | None, tuple[int, ...]]]]:
        request, end = span.request, span.start_position + span.n_tokens
        tokens = [token_at(request, at) for at in range(end - span.n_drafts)]
        if span.n_drafts:
            tokens += span.token_ids[-span.n_drafts :]
        scope = request.cache_scope
        return [(at, (group, scope, tuple(tokens[: at + 1]))) for at in range(first, end)]


class TokenAt:
    """The tokens of the arrivals of a driver."""

    def __init__(self, driver_arrivals: Sequence[Arrival]) -> None:
        self._arrivals = driver_arrivals

    def __call__(self, request: Request, position: int) -> int:
        arrival = self._arrivals[int(request.request_id)]
        n_generated = position - arrival.n_prompt + 1
        return STOP_TOKEN if n_generated == arrival.n_iterations else PLAIN_TOKEN


class WindowDriver(Driver):
    """A perfect engine with groups, which samples nonsense after a wrong draft."""

    memory: GroupedMemory
    token_at: TokenAt

    def select(self) -> Batch | None:
        batch = super().select()
        if batch is not None:
            self.memory.run(batch, self.token_at)
        return batch

    def return_oldest(self) -> None:
        batch = self.in_flight.pop(0)
        tokens = [token for span in batch.spans if span.is_sampled for token in self._tokens(span)]
        self.updates += self.scheduler.apply(batch.iteration, tokens)

    def _tokens(self, span: Span) -> list[int]:
        first = span.start_position + span.n_tokens - span.n_drafts
        right = [self.token_at(span.request, first + i) for i in range(span.n_drafts + 1)]
        drafts = span.token_ids[len(span.token_ids) - span.n_drafts :]
        n_right = n_leading_equal(drafts, right)
        return [*right[: n_right + 1], *[GARBAGE] * (span.n_drafts - n_right)]


def blocks_held(reservation: Reservation, n_whole: int) -> list[tuple[int, int]]:
    """Returns the blocks of a reservation with their groups."""
    held = [(at % n_whole, block_id) for at, block_id in enumerate(reservation.block_ids)]
    for group, blocks in enumerate(reservation.window_blocks, n_whole):
        held += [(group, block_id) for block_id in blocks.block_ids]
    return held


def check_blocks(driver: Driver) -> None:
    """Checks that reservations are kept, that their sum is all that was reserved, and that a block
    has several owners only in the prefix cache and within one group."""
    manager = driver.scheduler.kv_manager
    n_whole, cache = manager.groups.n_whole, manager.prefix_cache
    on_board = {span.request for batch in driver.in_flight for span in batch.spans}
    holders = [
        request.reservation
        for request in {*driver.scheduler.pool, *on_board}
        if request.reservation is not None
    ]
    group_of: dict[int, int] = {}
    n_users: dict[int, int] = {}
    for reservation in holders:
        held = blocks_held(reservation, n_whole)
        assert len(held) <= reservation.n_reserved_blocks
        for group, block_id in held:
            assert group_of.setdefault(block_id, group) == group
            n_users[block_id] = n_users.get(block_id, 0) + 1
            assert n_users[block_id] == 1 or (cache is not None and block_id in cache)
    whole = [block_id for one in holders for block_id in one.block_ids]
    n_reserved = sum(one.n_reserved_blocks for one in holders) - len(whole) + len(set(whole))
    assert n_reserved == manager.n_reserved_blocks <= manager.n_blocks
    assert manager.n_allocated_blocks == len(n_users)
    assert len(n_users) <= manager.n_reserved_blocks


def policy_of(max_batch_tokens: int | None, *, n_shares: int) -> Policy:
    """Returns the policy of the paper, or one with a budget of tokens."""
    if max_batch_tokens is None:
        return OrcaPolicy(max_batch_size=6)
    return ChunkedPolicy(max_batch_size=6, max_batch_tokens=max_batch_tokens, n_shares=n_shares)


def use_of(share: float | None) -> ExpectedUse | None:
    """Returns a use that has learned this share; None for None, where all is reserved."""
    if share is None:
        return None
    use = ExpectedUse()
    use.share = share
    return use


WINDOWS = st.sampled_from(
    [(3,), (1,), (8,), (None, 3), (None, 5, 5), (None, None, 4), (2, 7), (None, 1, 6), (None,)]
)


@given(
    requests=arrivals(
        with_cancellations=True, clients=("", "a", "b2"), priorities=(0, 0, 1), n_requests=12
    ),
    data=st.data(),
    windows=WINDOWS,
    is_chunked=st.booleans(),
    is_fair=st.booleans(),
    max_batch_tokens=st.integers(6, 30),
    pipeline_depth=st.integers(1, 4),
    token_hand_off=st.booleans(),
    block_size=st.sampled_from([1, 2, 4]),
    n_more_blocks=st.integers(0, 30),
    share=st.sampled_from([None, 0.0, 0.3, 1.0]),
    has_prefix_cache=st.booleans(),
    max_drafts=st.sampled_from([0, 4]),
)
def test_every_query_finds_what_it_sees_whatever_comes_back_behind_it(
    requests: list[Arrival],
    data: st.DataObject,
    windows: tuple[int | None, ...],
    is_chunked: bool,
    is_fair: bool,
    max_batch_tokens: int,
    pipeline_depth: int,
    token_hand_off: bool,
    block_size: int,
    n_more_blocks: int,
    share: float | None,
    has_prefix_cache: bool,
    max_drafts: int,
) -> None:
    tokens = st.lists(st.sampled_from([PLAIN_TOKEN, PLAIN_TOKEN, STOP_TOKEN, 5]), max_size=4)

    def propose(sequence: bytes, length: int) -> list[int]:
        return data.draw(tokens)[:length]

    max_drafts *= is_chunked
    groups = BlockGroups(
        windows,
        max_span_tokens=max_batch_tokens if is_chunked else None,
        max_drafts=max_drafts,
    )
    longest = max(one.n_prompt + one.max_new_tokens for one in requests)
    n_needed = groups.n_blocks(
        -(-longest // block_size), groups.n_at_once(longest), block_size=block_size
    )
    use = use_of(share)
    policy = policy_of(
        max_batch_tokens if is_chunked else None, n_shares=1 if token_hand_off else pipeline_depth
    )
    pool = RequestPool(
        max_requests=1000, order=Fair(ageing_s=30.0, now=lambda: 0.0) if is_fair else None
    )

    def new_core() -> Scheduler:
        return Scheduler(
            pool,
            KVManager(
                n_blocks=n_needed + n_more_blocks,
                block_size=block_size,
                groups=groups,
                has_prefix_cache=has_prefix_cache,
                expected_use=use,
            ),
            policy=policy,
            pipeline_depth=pipeline_depth,
            token_hand_off=token_hand_off,
            drafter=Drafter(max_drafts, max_batch_tokens, propose) if max_drafts else None,
        )

    driver = WindowDriver(new_core(), requests)
    driver.token_at = TokenAt(requests)
    driver.memory = GroupedMemory(groups, block_size=block_size)
    n_epochs = 1
    for _ in range(600):
        if driver.is_done:
            break
        driver.arrive()
        for request in driver.requests.values():
            request.speculation = request.speculation or Speculation(length=4)
        is_lost = n_epochs < 3 and data.draw(st.integers(0, 15)) == 15
        if is_lost:
            n_epochs += 1
            driver.in_flight.clear()
            driver.updates += driver.scheduler.suspend()[1]
            driver.scheduler = new_core()
            driver.memory = GroupedMemory(groups, block_size=block_size)
            assert driver.scheduler.adopt() == []
        while driver.select() is not None:
            check_blocks(driver)
        assert driver.in_flight or not len(pool), "somebody always runs"
        while driver.in_flight and (
            len(driver.in_flight) == pipeline_depth or data.draw(st.booleans())
        ):
            driver.return_oldest()
            check_blocks(driver)
    assert driver.is_done
    while driver.in_flight:
        driver.return_oldest()
    manager = driver.scheduler.kv_manager
    assert manager.n_reserved_blocks == manager.n_allocated_blocks == 0


def request_of(n_prompt: int, max_new_tokens: int, *, scope: bytes | None = None) -> Request:
    return Request(RequestId("0"), list(range(1, n_prompt + 1)), max_new_tokens, cache_scope=scope)


def manager_of(
    windows: Sequence[int | None],
    *,
    n_blocks: int,
    max_span_tokens: int | None = 8,
    has_prefix_cache: bool = False,
) -> KVManager:
    return KVManager(
        n_blocks=n_blocks,
        block_size=4,
        groups=BlockGroups(windows, max_span_tokens=max_span_tokens),
        has_prefix_cache=has_prefix_cache,
    )


def serve(manager: KVManager, *requests: Request) -> list[int]:
    """Runs requests to their ends, with chunks of 8; returns the blocks in use in each step."""
    scheduler = Scheduler(
        RequestPool(max_requests=9),
        manager,
        policy=ChunkedPolicy(max_batch_size=4, max_batch_tokens=8),
        pipeline_depth=1,
    )
    for request in requests:
        scheduler.submit(request)
    in_use = []
    while (batch := scheduler.select()) is not None:
        in_use.append(manager.n_allocated_blocks)
        sampled = [span for span in batch.spans if span.is_sampled]
        scheduler.apply(batch.iteration, [1] * len(sampled))
    assert not len(scheduler.pool)
    return in_use


@pytest.mark.parametrize("n_tokens", [16, 60, 400])
def test_a_request_holds_no_more_than_a_window_and_a_span_whatever_its_length(
    n_tokens: int,
) -> None:
    in_use = serve(manager_of((10,), n_blocks=6), request_of(n_tokens, n_tokens))
    assert max(in_use) <= 6  # of 9 + 8 positions in a row
    assert max(in_use[len(in_use) // 2 :]) <= 4, "a decode sees 10 positions"


def test_only_groups_with_windows_give_back() -> None:
    manager = manager_of((None, 10), n_blocks=120)
    in_use = serve(manager, request_of(200, 200))
    assert in_use[-1] in range(100, 105)
    same = manager_of((None, None), n_blocks=220)
    assert serve(same, request_of(200, 200))[-1] == 200


def test_what_a_prompt_reserves_is_free_once_it_decodes() -> None:
    manager = manager_of((10,), n_blocks=20, max_span_tokens=None)
    reservation = manager.reserve(request_of(40, 40))
    assert reservation is not None
    assert manager.n_reserved_blocks == 13  # of 9 + 40 positions, wherever they begin
    manager.allocate(reservation, 40, start=0, n_unscheduled=40)
    manager.allocate(reservation, 41, start=40, n_unscheduled=0)
    assert manager.n_reserved_blocks == 4
    assert manager.n_allocated_blocks == 4
    manager.release(reservation)
    assert manager.n_reserved_blocks == manager.n_allocated_blocks == 0


@pytest.mark.parametrize("windows", [(10,), (None,), (None, 10), (None, None, 10)], ids=str)
def test_the_longest_sequence_that_fits_is_the_longest_that_is_let_in(
    windows: tuple[int | None, ...],
) -> None:
    manager = manager_of(windows, n_blocks=40)
    longest = manager.max_sequence_len
    assert manager.fits_ever(longest)
    if windows == (10,):
        assert longest == 2**31 - 1
    else:
        assert not manager.fits_ever(longest + 1)
        serve(manager, request_of(longest - 1, 1))


def test_who_is_too_long_is_told_what_fits() -> None:
    manager = manager_of((None, 10), n_blocks=7)
    assert (manager.n_slots, manager.max_sequence_len) == (14, 12)
    scheduler = Scheduler(
        RequestPool(max_requests=9),
        manager,
        policy=ChunkedPolicy(max_batch_size=4, max_batch_tokens=8),
        pipeline_depth=1,
    )
    with pytest.raises(InvalidRequest, match="more than the 12 K/V slots"):
        scheduler.submit(request_of(12, 1))


class TestWhatIsCached:
    """A hit needs every group: all of it where everything is seen, elsewhere its end."""

    def hit(self, manager: KVManager, request: Request) -> int:
        serve(manager, request)
        return request.n_cached_tokens

    def test_the_end_of_a_window_is_enough(self) -> None:
        manager = manager_of((10,), n_blocks=30, has_prefix_cache=True)
        serve(manager, request_of(60, 1, scope=b""))
        assert isinstance(manager.prefix_cache, PrefixCache)
        for block_id in list(manager.prefix_cache._unused)[:11]:
            assert manager.prefix_cache.evict() == block_id
        assert len(manager.prefix_cache) == 4
        assert self.hit(manager, request_of(70, 1, scope=b"")) == 60

    def test_a_hole_in_the_window_shortens_a_hit_to_what_is_whole(self) -> None:
        manager = manager_of((None, 10), n_blocks=80, has_prefix_cache=True)
        first = request_of(60, 1, scope=b"")
        serve(manager, first)
        cache = manager.prefix_cache
        assert isinstance(cache, PrefixCache)
        assert first.block_keys is not None
        gone = cache._block_of.pop(first.block_keys.keys[13] + b"\x01")
        del cache._unused[gone], cache._key_of[gone]
        manager.blocks._free.append(gone)
        assert manager.n_cached_columns(request_of(70, 1, scope=b"")) == 13
        assert manager.n_cached_columns(request_of(50, 1, scope=b"")) == 12
        assert self.hit(manager, request_of(70, 1, scope=b"")) == 52

    def test_two_that_share_a_window_go_on_each_with_its_own_blocks(self) -> None:
        manager = manager_of((10,), n_blocks=12, has_prefix_cache=True)
        serve(manager, request_of(24, 1, scope=b""))
        pair = [request_of(24, 40, scope=b"") for _ in range(2)]
        pair[1].request_id = RequestId("1")
        in_use = serve(manager, *pair)
        assert [request.n_cached_tokens for request in pair] == [20, 20]
        assert max(in_use) <= 12


@pytest.mark.parametrize("windows", [(), (0,), (5, None)], ids=str)
def test_groups_that_are_none_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match="no K/V groups"):
        BlockGroups(windows)
