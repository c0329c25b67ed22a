"""Several scheduling cores on one pool: each token comes once, no pipeline idles for nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.errors import InvalidRequest
from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fair_batch import FairBatch
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.placement import RUNNING_TOKENS
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import FinishReason, Request, RequestId, RequestState
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler

BLOCK_SIZE = 4
MAX_BATCH_SIZE = 3


def token_at(request: Request, position: int) -> int:
    """Returns the token that the model has for a request at a position."""
    return 1 + (sum(request.request_id.encode()) * 7 + position * 13) % 97


@dataclass
class Line:
    """One pipeline: its core while it serves, and its batches in flight."""

    pool: RequestPool
    core: Scheduler | None = None
    in_flight: list[Batch] = field(default_factory=list)
    is_awake: bool = False
    is_draining: bool = False
    is_last: bool = False

    def wake(self) -> None:
        self.is_awake = True


class Site:
    """Pipelines on one pool. A pipeline selects only when it is woken or a batch has returned, as a
    serving loop does."""

    def __init__(
        self,
        n_pipelines: int,
        *,
        order: Order | None = None,
        policy: Callable[[], Policy] = lambda: OrcaPolicy(max_batch_size=MAX_BATCH_SIZE),
        n_blocks: int = 12,
        is_optimistic: bool = False,
    ) -> None:
        pool = RequestPool(max_requests=1000, order=order)
        self.pool = pool
        self.lines = [Line(pool)] + [Line(pool.beside()) for _ in range(n_pipelines - 1)]
        self._policy = policy
        self._n_blocks = n_blocks
        self._is_optimistic = is_optimistic
        self.requests: list[Request] = []
        self.outputs: dict[Request, list[int]] = {}
        self.ends: dict[Request, FinishReason] = {}

    @property
    def serving(self) -> list[Line]:
        return [line for line in self.lines if line.core is not None]

    def open(self, line: Line, *, depth: int = 1, has_cache: bool = True, build: str = "a") -> None:
        line.core = Scheduler(
            line.pool,
            KVManager(
                n_blocks=self._n_blocks,
                block_size=BLOCK_SIZE,
                has_prefix_cache=has_cache,
                expected_use=ExpectedUse() if self._is_optimistic else None,
            ),
            policy=self._policy(),
            pipeline_depth=depth,
            build=build,
        )
        line.is_draining = line.is_last = False
        line.pool.wake = line.wake
        self.take(line.core.adopt())
        line.wake()
        self.settle()

    def lose(self, line: Line) -> None:
        assert line.core is not None
        _, ended = line.core.suspend()
        line.core = None
        line.in_flight.clear()
        self.take(ended)
        self.settle()

    def drain(self, line: Line, *, is_last: bool = False) -> None:
        assert line.core is not None
        line.is_draining, line.is_last = True, line.is_last or is_last
        line.core.drain(is_last=is_last)
        self.settle()

    def be_late(self, line: Line) -> list[Request]:
        """Lets the requests of a pipeline go on elsewhere, which returns its batches later."""
        assert line.core is not None
        moved, ended = line.core.release_late()
        self.take(ended)
        self.settle()
        return moved

    def submit(self, n_prompt: int, max_new_tokens: int, account: AccountUse | None = None) -> None:
        request = Request(
            RequestId(str(len(self.requests))),
            list(range(1, n_prompt + 1)),
            max_new_tokens,
            account=account,
        )
        core = self.serving[0].core
        assert core is not None
        core.submit(request)
        self.requests.append(request)
        self.outputs[request] = []
        self.settle()

    def cancel(self, request: Request) -> None:
        holders = [line.core for line in self.serving if request in line.pool.running]
        core = (holders or [self.serving[0].core])[0]
        assert core is not None
        self.take(core.cancel(request))
        self.settle()

    def return_oldest(self, line: Line) -> None:
        assert line.core is not None
        batch = line.in_flight.pop(0)
        tokens = [_token(span) for span in batch.spans if span.is_sampled]
        self.take(line.core.apply(batch.iteration, tokens))
        line.wake()
        self.settle()

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            assert update.request not in self.ends
            if update.token_id is not None:
                self.outputs[update.request].append(update.token_id)
            if update.finish_reason is not None:
                self.ends[update.request] = update.finish_reason

    def settle(self) -> None:
        """Lets the pipelines that were woken select, until none has anything to do."""
        while awake := [line for line in self.lines if line.is_awake]:
            for line in awake:
                line.is_awake = False
                if line.core is None:
                    continue
                serving, before = list(self.serving), dict.fromkeys(line.pool.running)
                builds = {request: request.build for request in self.pool.order}
                while (batch := line.core.select()) is not None:
                    line.core.take_preempted()
                    line.in_flight.append(batch)
                for request in line.pool.running - before.keys():
                    assert line in may_run(serving, request, builds[request])
                    has_changed = request.generated_token_ids and builds[request] != request.build
                    assert request.left_build == (builds[request] if has_changed else None)
                if line.core.has_left:
                    assert line.core.suspend() == ([], [])
                    line.core = None

    def run(self) -> None:
        """Lets all batches return until nothing is in flight."""
        while busy := [line for line in self.serving if line.in_flight]:
            for line in busy:
                self.return_oldest(line)

    def check(self) -> None:
        """Checks what holds whenever all pipelines sleep."""
        running = [request for line in self.lines for request in line.pool.running]
        assert len(running) == len(set(running))
        assert not set(running) & set(self.pool.order)
        assert set(running) | set(self.pool.order) == set(self.pool) == self.requests_left
        for request, output in self.outputs.items():
            first = request.n_prompt_tokens
            expected = [token_at(request, first + i) for i in range(len(output))]
            assert output == expected == request.generated_token_ids.tolist()
        vectors = [one for one in self.requests_left if one.wants_vector]
        assert self.pool.shared.n_vectors == len(vectors)
        assert self.pool.n_waiting_answers == len(
            [one for one in self.pool.order if not one.wants_vector]
        )
        for line in self.lines:
            assert line.pool.n_running_vectors == len(set(line.pool.running) & set(vectors))
            ready = [one.request_id for one in line.pool.ready_by_place]
            assert len(ready) == len(set(ready))
            for batch in line.in_flight:
                assert len({span.request for span in batch.spans}) == len(batch.spans)
        for line in self.serving:
            assert line.core is not None
            kv_manager = line.core.kv_manager
            assert kv_manager.n_reserved_blocks <= kv_manager.n_blocks
            assert not line.core.has_left
            assert not line.pool.is_late or not line.pool.ready_by_place or line.in_flight
            if line.pool.is_late or self.pool.has_trials:
                continue
            if not line.pool.running and not line.in_flight:
                for request in self.pool.order:
                    if line in may_run(self.serving, request, request.build):
                        assert self._is_sooner_elsewhere(line, request)

    def _is_sooner_elsewhere(self, idle: Line, request: Request) -> bool:
        """Returns whether fewer tokens come before the first token of a request in another pipeline
        than in one that has no requests."""
        return any(
            sum(RUNNING_TOKENS + max(0, one.n_prefill_tokens - one.n_scheduled) for one in running)
            + _n_uncached(line, request)
            < _n_uncached(idle, request)
            for line in self.serving
            if (running := line.pool.running) and self.pool.order.may_begin(request, running)
        )

    @property
    def requests_left(self) -> set[Request]:
        return {request for request in self.requests if request not in self.ends}


def may_run(serving: list[Line], request: Request, build: str) -> list[Line]:
    """Returns the pipelines that may admit a request, whose tokens a build has made."""
    n_tokens = request.max_sequence_len
    fitting = [
        line
        for line in serving
        if line.core and not line.is_last and line.core.kv_manager.fits_ever(n_tokens)
    ]
    if request.generated_token_ids:
        fitting = [line for line in fitting if line.pool.build == build] or fitting
    return [line for line in fitting if not line.is_draining] or fitting


def _n_uncached(line: Line, request: Request) -> int:
    assert line.core is not None
    return request.n_tokens - BLOCK_SIZE * line.core.kv_manager.n_cached_columns(request)


def _token(span: Span) -> int:
    return token_at(span.request, span.start_position + span.n_tokens)


POLICIES: list[Callable[[], Policy]] = [
    lambda: OrcaPolicy(max_batch_size=MAX_BATCH_SIZE),
    lambda: ChunkedPolicy(max_batch_size=MAX_BATCH_SIZE, max_batch_tokens=5),
    lambda: ChunkedPolicy(max_batch_size=MAX_BATCH_SIZE, max_batch_tokens=5, vector_share=0.02),
]


class Fleet(RuleBasedStateMachine):
    """Requests come and go, and pipelines come and are lost, in any order."""

    @initialize(
        n_pipelines=st.integers(1, 3),
        is_fair=st.booleans(),
        policy=st.sampled_from(POLICIES),
        is_optimistic=st.booleans(),
        batch_tokens=st.none() | st.integers(1, 3),
    )
    def begin(
        self,
        n_pipelines: int,
        is_fair: bool,
        policy: Callable[[], Policy],
        is_optimistic: bool,
        batch_tokens: int | None,
    ) -> None:
        self.now = 0.0
        order: Order = FirstComeFirstServed()
        if is_fair:
            batch = None if batch_tokens is None else FairBatch(batch_tokens)
            order = Fair(ageing_s=1.0, now=lambda: self.now, batch=batch)
        self.site = Site(n_pipelines, order=order, policy=policy, is_optimistic=is_optimistic)
        self.accounts = [AccountUse(AccountLimits(weight=w), name=str(w)) for w in (1.0, 2.0)]
        for line in self.site.lines:
            self.site.open(line)

    @rule(
        n_prompt=st.integers(1, 20),
        n_new=st.integers(0, 8),
        client=st.integers(0, 1),
        time_s=st.floats(0, 2),
    )
    @precondition(lambda self: self.site.serving)
    def submit(self, n_prompt: int, n_new: int, client: int, time_s: float) -> None:
        self.now += time_s
        self.site.submit(n_prompt, n_new, self.accounts[client])

    @rule(index=st.integers(0, 2))
    def return_oldest(self, index: int) -> None:
        busy = [line for line in self.site.serving if line.in_flight]
        if busy:
            self.site.return_oldest(busy[index % len(busy)])

    @rule(index=st.integers(0, 99))
    @precondition(lambda self: self.site.serving and self.site.requests_left)
    def cancel(self, index: int) -> None:
        left = [one for one in self.site.requests if one not in self.site.ends]
        self.site.cancel(left[index % len(left)])

    @rule(index=st.integers(0, 2))
    @precondition(lambda self: self.site.serving)
    def lose(self, index: int) -> None:
        self.site.lose(self.site.serving[index % len(self.site.serving)])

    @rule(index=st.integers(0, 2), is_last=st.booleans())
    @precondition(lambda self: self.site.serving)
    def drain(self, index: int, is_last: bool) -> None:
        line = self.site.serving[index % len(self.site.serving)]
        self.site.drain(line, is_last=is_last)

    @rule(index=st.integers(0, 2))
    def be_late(self, index: int) -> None:
        busy = [line for line in self.site.serving if line.in_flight]
        if busy:
            self.site.be_late(busy[index % len(busy)])

    @rule(depth=st.integers(1, 3), has_cache=st.booleans(), build=st.sampled_from("ab"))
    @precondition(lambda self: len(self.site.serving) < len(self.site.lines))
    def form(self, depth: int, has_cache: bool, build: str) -> None:
        closed = next(line for line in self.site.lines if line.core is None)
        self.site.open(closed, depth=depth, has_cache=has_cache, build=build)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "site"):
            self.site.check()

    def teardown(self) -> None:
        if not hasattr(self, "site"):
            return
        for line in self.site.lines:
            if line.core is None:
                self.site.open(line)
        for line in self.site.serving:
            if all(one.is_draining for one in self.site.serving):
                self.site.drain(line, is_last=True)
                self.site.run()
                assert line.core is None
                self.site.open(line)
        self.site.run()
        self.site.check()
        assert not self.site.requests_left
        for line in self.site.serving:
            assert line.core is not None
            assert line.core.kv_manager.n_reserved_blocks == 0


Fleet.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestFleet = Fleet.TestCase


def test_requests_spread_over_idle_pipelines() -> None:
    site = Site(3)
    for line in site.lines:
        site.open(line, depth=3)
    for _ in range(6):
        site.submit(4, 4)
    assert [len(line.pool.running) for line in site.lines] == [2, 2, 2]


def test_request_goes_to_the_pipeline_that_has_its_beginning() -> None:
    site = Site(2)
    for line in site.lines:
        site.open(line)
    site.submit(3, 1)  # to the first pipeline
    site.submit(40, 1)  # to the second one, since the first has a request
    assert [len(line.pool.running) for line in site.lines] == [1, 1]
    site.return_oldest(site.lines[1])
    site.return_oldest(site.lines[0])
    site.submit(40, 1)  # the first one would take it, were it not for its beginning
    assert [len(line.pool.running) for line in site.lines] == [0, 1]
    [batch] = site.lines[1].in_flight
    assert batch.spans[0].request.n_cached_tokens == 36


def test_requests_of_a_lost_pipeline_go_on_elsewhere_at_their_old_places() -> None:
    site = Site(2)
    for line in site.lines:
        site.open(line, depth=3)
    for _ in range(8):
        site.submit(4, 3)
    first, second = site.lines
    assert len(first.pool.running) == len(second.pool.running) == 3
    moved = list(first.pool.running)
    site.lose(first)
    assert all(request.state is RequestState.INITIATION for request in moved)
    assert list(site.pool.order)[:3] == moved
    site.run()
    assert not site.requests_left


def test_requests_of_a_late_pipeline_go_on_elsewhere_and_it_keeps_its_memory() -> None:
    site = Site(2, policy=lambda: OrcaPolicy(max_batch_size=8))
    for line in site.lines:
        site.open(line, depth=2)
    late, other = site.lines
    site.submit(9, 6)
    site.submit(9, 6)
    [moved] = late.pool.running
    for _ in range(2):
        site.return_oldest(late)
    assert site.be_late(late) == [moved]
    assert moved in other.pool.running
    assert late.core is not None
    kv_manager = late.core.kv_manager
    assert kv_manager.n_allocated_blocks > 0, "a batch in flight uses the memory"
    n_before = len(site.outputs[moved])
    site.return_oldest(late)
    assert len(site.outputs[moved]) == n_before, "the token comes from the other pipeline"
    assert kv_manager.n_reserved_blocks == 0
    assert kv_manager.n_cached_columns(moved) > 0
    site.submit(9, 6)
    assert late.pool.running, "it takes requests again"
    site.be_late(late)
    site.submit(9, 6)
    late.wake()
    site.settle()
    assert not late.pool.running, "a late pipeline admits nothing"
    site.return_oldest(late)
    assert late.pool.running
    site.run()
    assert not site.requests_left


def test_late_pipeline_takes_its_requests_again_if_no_other_had_room() -> None:
    site = Site(2, policy=lambda: OrcaPolicy(max_batch_size=1))
    for line in site.lines:
        site.open(line)
    site.submit(9, 6)
    site.submit(9, 6)
    late, _ = site.lines
    [moved] = late.pool.running
    site.return_oldest(late)
    site.be_late(late)
    assert list(site.pool.order) == [moved]
    site.return_oldest(late)
    assert moved in late.pool.running
    assert moved.n_cached_tokens == 8, "no more than the last block is computed again"
    site.run()
    assert not site.requests_left


def test_request_is_moved_again_only_after_progress() -> None:
    site = Site(2, policy=lambda: OrcaPolicy(max_batch_size=8))
    for line in site.lines:
        site.open(line)
    first, second = site.lines
    site.submit(9, 6)
    [request] = first.pool.running
    assert site.be_late(first) == [request]
    assert request in second.pool.running
    site.return_oldest(first)
    assert site.be_late(second) == []
    for _ in range(2):
        site.return_oldest(second)
    assert site.be_late(second) == [request]


def test_suspect_stays_in_a_late_pipeline() -> None:
    site = Site(2, policy=lambda: OrcaPolicy(max_batch_size=8))
    for line in site.lines:
        site.open(line)
    first, second = site.lines
    site.submit(9, 6)
    [request] = first.pool.running
    site.lose(first)
    assert request.is_suspect
    assert request in second.pool.running
    site.open(first)
    assert site.be_late(second) == []
    assert request in second.pool.running


def test_request_that_fits_only_elsewhere_is_left_there() -> None:
    site = Site(1, n_blocks=4)
    site.open(site.lines[0])
    with pytest.raises(InvalidRequest):
        site.submit(20, 4)
    larger = Line(site.pool.beside())
    site.lines.insert(0, larger)
    site._n_blocks = 12
    site.open(larger)
    site.submit(20, 4)
    site.submit(4, 4)
    assert [len(line.pool.running) for line in site.lines] == [1, 1]


def test_small_pipeline_serves_on_when_the_larger_one_is_lost() -> None:
    site = Site(1, n_blocks=4)
    site.open(site.lines[0], depth=3)
    larger = Line(site.pool.beside())
    site.lines.insert(0, larger)
    site._n_blocks = 12
    site.open(larger, depth=3)
    site.submit(20, 4)
    site.lose(larger)
    site.submit(4, 4)
    [small] = site.serving
    assert [one.n_prompt_tokens for one in small.pool.running] == [4]


def test_request_that_waits_for_the_memory_of_one_pipeline_holds_back_no_other_pipeline() -> None:
    site = Site(1, n_blocks=4)
    small = site.lines[0]
    site.open(small, depth=3)
    large = Line(site.pool.beside())
    site.lines.insert(0, large)
    site._n_blocks = 12
    site.open(large, depth=3)
    site.submit(30, 4)
    site.submit(28, 4)  # waits for the memory of the large pipeline
    site.submit(4, 4)
    site.submit(4, 4)
    assert [one.n_prompt_tokens for one in small.pool.running] == [4, 4]


def test_request_goes_where_its_grammar_is_compiled() -> None:
    site = Site(2)
    for line in site.lines:
        site.open(line, depth=3)
    first, second = site.lines
    site.submit(4, 4)  # so that the second pipeline would be preferred
    assert first.core is not None
    assert second.core is not None
    request = Request(RequestId("x"), [1, 2], 4, grammar=b"g", grammar_digest=b"digest")
    first.core.submit(request)
    for core in (first.core, second.core):
        assert core.next_grammar() is not None
    assert first.core.note_grammar(b"digest") == []
    assert second.core.note_grammar(b"digest", "the ranks cannot follow it") == []
    first.wake()
    site.settle()
    assert request in first.pool.running


def test_draining_pipeline_moves_requests_that_have_more_to_wait_for_than_to_compute() -> None:
    site = Site(2, n_blocks=60)
    first, second = site.lines
    site.open(first, depth=3)
    site.submit(100, 2)  # is over sooner than its prompt would be computed again
    site.submit(4, 100)
    site.open(second, depth=3)
    site.drain(first)
    short, long = site.requests
    assert list(first.pool.running) == [short, long]  # each is in a batch in flight
    site.return_oldest(first)
    site.return_oldest(first)
    assert list(first.pool.running) == [short]
    assert list(second.pool.running) == [long]
    assert site.outputs[long]  # of the iteration that was in flight
    site.submit(4, 1)
    assert len(second.pool.running) == 2
    site.return_oldest(first)
    assert first.core is None
    site.run()
    assert not site.requests_left


def test_request_stays_in_a_draining_pipeline_while_no_other_has_room() -> None:
    site = Site(2, n_blocks=8)
    for line in site.lines:
        site.open(line, depth=3)
    site.submit(4, 20)
    site.submit(4, 20)
    first, second = site.lines
    assert len(first.pool.running) == len(second.pool.running) == 1
    site.drain(first)
    site.return_oldest(first)
    assert len(first.pool.running) == 1
    site.drain(first, is_last=True)
    site.return_oldest(first)
    assert first.core is None
    assert site.pool.n_waiting == 1
    site.run()
    assert not site.requests_left


def test_only_pipeline_serves_on_while_it_drains_until_another_one_serves() -> None:
    site = Site(2)
    first, second = site.lines
    site.open(first, depth=3)
    site.drain(first)
    site.submit(4, 12)
    assert len(first.pool.running) == 1
    site.return_oldest(first)
    assert first.core is not None
    site.open(second, depth=3)
    site.return_oldest(first)
    assert first.core is None
    assert len(second.pool.running) == 1


def test_request_stays_with_the_build_of_its_tokens_as_long_as_it_serves() -> None:
    site = Site(3)
    old, new, other = site.lines
    site.open(old, build="old")
    site.submit(4, 12)
    site.return_oldest(old)
    site.open(new, build="new")
    [request] = site.requests
    site.drain(old)
    site.return_oldest(old)
    assert list(old.pool.running) == [request]
    site.open(other, build="old")
    site.return_oldest(old)
    assert old.core is None
    assert list(other.pool.running) == [request]
    assert request.left_build is None
    site.lose(other)
    [moved] = new.pool.running
    assert (moved.left_build, moved.build) == ("old", "new")
