"""The prefix cache: what is found is what was computed, nobody finds what is not his, and the
accounts of memory stay right."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.prefix_cache import PrefixCache
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.stored import StoredTokens
from tests.scheduler.core.workload import build

BLOCK_SIZE = 4
SCOPES: list[bytes | None] = [b"", b"ann", None]
STEM = [1, 1, 2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 2, 2, 1]


def request_of(
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 4,
    scope: bytes | None = b"",
    generated: Sequence[int] = (),
    n_prompt_logprobs: int | None = None,
) -> Request:
    return Request(
        RequestId("r"),
        prompt_token_ids=list(prompt),
        max_new_tokens=max_new_tokens,
        cache_scope=scope,
        generated_token_ids=array(TOKEN_ID, generated),
        n_prompt_logprobs=n_prompt_logprobs,
    )


def generated_at(request: Request, position: int) -> int:
    """The token that a request generates: some have the same ones, and go on alike."""
    return (sum(request.prompt_token_ids) + position) % 3 + 1


# One request after the other


def alone(n_blocks: int = 40) -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        pipeline_depth=1,
        has_prefix_cache=True,
    )


def serve(scheduler: Scheduler, *requests: Request) -> list[Span]:
    """Runs requests beside each other to their ends; returns their first spans."""
    firsts: list[Span] = []
    for request in requests:
        scheduler.submit(request)
    while len(scheduler.pool):
        batch = scheduler.select()
        assert batch is not None
        firsts += [span for span in batch.spans if span.is_admission]
        scheduler.apply(batch.iteration, _tokens_of(batch))
    return firsts


def _tokens_of(batch: Batch) -> list[int]:
    return [
        generated_at(span.request, span.start_position + span.n_tokens)
        for span in batch.spans
        if span.is_sampled
    ]


def n_cached(scheduler: Scheduler, request: Request) -> int:
    [span] = serve(scheduler, request)
    assert request.n_cached_tokens == span.start_position
    return span.start_position


@pytest.mark.parametrize(
    ("n_prompt", "expected"),
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)],
    ids=str,
)
def test_a_prompt_begins_after_its_full_blocks_and_computes_at_least_one_token(
    n_prompt: int, expected: int
) -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM[:13]))
    assert n_cached(scheduler, request_of(STEM[:n_prompt])) == expected


def test_the_plan_has_the_blocks_that_are_shared_and_those_that_are_new() -> None:
    scheduler = alone()
    [first] = serve(scheduler, request_of(STEM[:9]))
    [second] = serve(scheduler, request_of(STEM[:10]))
    assert second.new_block_ids[:2] == first.new_block_ids[:2]
    assert (second.start_position, second.token_ids) == (8, STEM[8:10])


def test_generated_tokens_are_there_for_the_next_turn() -> None:
    scheduler = alone()
    first = request_of(STEM[:6], max_new_tokens=8)
    serve(scheduler, first)
    said = [*STEM[:6], *first.generated_token_ids]
    # Of 14 tokens the last one was never an input.
    assert n_cached(scheduler, request_of([*said, 1, 1])) == 13


def test_one_who_goes_on_gets_the_rest_and_others_do_not() -> None:
    scheduler = alone()
    [first] = serve(scheduler, request_of(STEM[:10], max_new_tokens=1))
    branch = request_of([*STEM[:9], 3, 3])
    same = request_of(STEM[:10])
    another, again = request_of(STEM[:12]), request_of(STEM[:12], max_new_tokens=1)
    firsts = serve(scheduler, branch, same, another, again)
    assert [span.start_position for span in firsts] == [8, 8, 10, 8], "it is one's own"
    assert firsts[2].new_block_ids[2] == first.new_block_ids[2], "nothing is copied"
    assert firsts[3].new_block_ids[2] != first.new_block_ids[2]


def test_only_the_same_scope_gets_a_rest() -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM[:10], max_new_tokens=1, scope=b"ann"))
    assert n_cached(scheduler, request_of(STEM[:12], scope=b"bob")) == 0
    assert n_cached(scheduler, request_of(STEM[:12], scope=b"ann")) == 10


def test_the_newest_rest_takes_the_place_of_the_one_before() -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM[:10], max_new_tokens=1))
    n_unused = scheduler.kv_manager.n_unused_slots
    serve(scheduler, request_of([*STEM[:8], 3], max_new_tokens=1))
    assert scheduler.kv_manager.n_unused_slots == n_unused
    assert n_cached(scheduler, request_of([*STEM[:8], 3, 3], max_new_tokens=1)) == 9
    assert n_cached(scheduler, request_of(STEM[:12], max_new_tokens=1)) == 8
    assert scheduler.kv_manager.blocks.n_evicted == 0


def test_a_rest_is_evicted_before_what_it_goes_on_from() -> None:
    scheduler = alone(n_blocks=4)
    serve(scheduler, request_of(STEM[:10], max_new_tokens=1))
    serve(scheduler, request_of([9, 9, 9, 9, 9], max_new_tokens=1))
    assert n_cached(scheduler, request_of(STEM[:12], max_new_tokens=1)) == 8


def test_what_differs_in_its_first_token_finds_nothing() -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM))
    assert n_cached(scheduler, request_of([7, *STEM[1:]])) == 0


@pytest.mark.parametrize("others", [b"", b"ann", b"bob", None], ids=str)
def test_only_the_same_scope_finds_anything(others: bytes | None) -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM, scope=others))
    assert n_cached(scheduler, request_of(STEM, scope=b"ann")) == (12 if others == b"ann" else 0)


def test_who_is_not_cached_finds_nothing_either() -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM))
    assert n_cached(scheduler, request_of(STEM, scope=None)) == 0


def test_log_probabilities_of_the_prompt_are_computed() -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM))
    assert n_cached(scheduler, request_of(STEM, n_prompt_logprobs=0)) == 0
    again = request_of(STEM, n_prompt_logprobs=0, generated=[1], max_new_tokens=4)
    assert n_cached(scheduler, again) == 16, "those of one that goes on have been told"


def test_a_request_that_goes_on_finds_its_generated_tokens() -> None:
    scheduler = alone()
    serve(scheduler, request_of(STEM[:6], max_new_tokens=8))
    said = [generated_at(request_of(STEM[:6]), position) for position in range(6, 14)]
    again = request_of(STEM[:6], generated=said[:7], max_new_tokens=9)
    assert n_cached(scheduler, again) == 12


def test_requests_that_come_together_share_from_the_next_iteration_on() -> None:
    scheduler = alone()
    spans = serve(scheduler, request_of(STEM), request_of(STEM))
    assert [span.start_position for span in spans] == [0, 0], "what runs beside it is not there yet"
    scheduler = alone()
    scheduler.submit(request_of(STEM))
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, _tokens_of(batch))
    [first, *_] = serve(scheduler, request_of(STEM))
    assert first.start_position == 12


def test_shared_blocks_are_reserved_once() -> None:
    scheduler = alone(n_blocks=9)
    kv_manager = scheduler.kv_manager
    scheduler.submit(request_of(STEM, max_new_tokens=8))  # 6 blocks
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, _tokens_of(batch))
    scheduler.submit(request_of(STEM, max_new_tokens=8))  # 6 blocks, of which 3 are shared
    batch = scheduler.select()
    assert batch is not None
    assert [span.start_position for span in batch.spans] == [16, 12]
    assert kv_manager.n_reserved_blocks == 9
    scheduler.submit(request_of(STEM[:8], max_new_tokens=1))
    assert (kv_manager.n_unused_slots, scheduler.pool.n_waiting) == (0, 1)


def test_a_request_that_does_not_fit_without_sharing_waits_for_no_block() -> None:
    scheduler = alone(n_blocks=6)
    serve(scheduler, request_of(STEM, max_new_tokens=8))
    assert scheduler.kv_manager.n_unused_slots > 0
    [span] = serve(scheduler, request_of([9] * 16, max_new_tokens=8))
    assert span.start_position == 0
    assert scheduler.kv_manager.blocks.n_evicted > 0


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    scheduler = alone(n_blocks=6)
    serve(scheduler, request_of(STEM, max_new_tokens=1))  # leaves 4 blocks in the cache
    serve(scheduler, request_of([9] * 12, max_new_tokens=4))  # needs 2 of them
    assert scheduler.kv_manager.blocks.n_evicted == 2
    assert n_cached(scheduler, request_of(STEM, max_new_tokens=1)) == 8


def test_who_was_used_last_is_evicted_last() -> None:
    scheduler = alone(n_blocks=6)
    old, new = [8] * 9, [9] * 9
    serve(scheduler, request_of(old, max_new_tokens=1))
    serve(scheduler, request_of(new, max_new_tokens=1))
    serve(scheduler, request_of(old, max_new_tokens=1))
    serve(scheduler, request_of([7] * 13, max_new_tokens=3))
    assert n_cached(scheduler, request_of(old, max_new_tokens=1)) == 8
    assert n_cached(scheduler, request_of(new, max_new_tokens=1)) == 0


def test_keys_of_another_block_size_are_not_used() -> None:
    request = request_of(STEM)
    for block_size in (4, 2):
        manager = KVManager(n_blocks=40, block_size=block_size, has_prefix_cache=True)
        reservation = manager.reserve(request)
        assert reservation is not None
        manager.allocate(reservation, 16)
        request.n_scheduled = 16
        manager.enter(request, reservation)
        manager.release(reservation)
        found = manager.reserve(request)
        assert found is not None
        assert found.n_cached_columns == 15 // block_size
        request.begin_anew()


def test_a_cache_that_is_full_gives_up_what_nobody_uses() -> None:
    manager = KVManager(n_blocks=40, block_size=4, has_prefix_cache=True)
    manager.blocks.cache = cache = PrefixCache(block_size=4, max_blocks=3)
    for first_token, n_expected in ((7, 2), (8, 2), (9, 3)):
        request = request_of([first_token] * (4 * n_expected))
        reservation = manager.reserve(request)
        assert reservation is not None
        manager.allocate(reservation, 4 * n_expected)
        request.n_scheduled = 4 * n_expected
        manager.enter(request, reservation)
        assert len(cache) <= 3
        assert all(block in cache for block in reservation.block_ids)
        if first_token < 9:
            manager.release(reservation)
    assert manager.blocks.n_evicted == 4
    assert manager.n_allocated_slots == 3 * 4
    assert manager.n_unused_slots == 0
    other = request_of([5] * 8)
    reservation = manager.reserve(other)
    assert reservation is not None
    manager.allocate(reservation, 8)
    other.n_scheduled = 8
    manager.enter(other, reservation)
    assert not any(block in cache for block in reservation.block_ids)


# Against a slow and obvious model


@dataclass
class ObviousCache:
    """Contents of blocks by their tokens, all of them, in the order in which they were left."""

    n_blocks: int
    users: dict[tuple[object, ...], int] = field(default_factory=dict)
    unused: list[tuple[object, ...]] = field(default_factory=list)
    """Those of rests are of no whole number of blocks."""
    n_own: int = 0

    def beginnings(self, request: Request, n_tokens: int) -> list[tuple[object, ...]]:
        tokens = request.span(0, n_tokens)
        ends = range(BLOCK_SIZE, n_tokens + 1, BLOCK_SIZE)
        return [(request.cache_scope, *tokens[:end]) for end in ends]

    def admit(self, request: Request) -> tuple[list[tuple[object, ...] | None], int]:
        """Returns what the request holds, and how many of its tokens are there."""
        found: list[tuple[object, ...] | None] = []
        if request.cache_scope is None:
            return found, 0
        for one in self.beginnings(request, request.n_tokens - 1):
            if one not in self.users and one not in self.unused:
                break
            found.append(one)
            self.users[one] = self.users.get(one, 0) + 1
            if one in self.unused:
                self.unused.remove(one)
        n_stored = BLOCK_SIZE * len(found)
        tokens = (request.cache_scope, *request.span(0, request.n_tokens))
        for n_tokens in range(n_stored + 1, min(n_stored + BLOCK_SIZE, request.n_tokens)):
            if found and tokens[: 1 + n_tokens] in self.unused:
                self.unused.remove(tokens[: 1 + n_tokens])
                self.n_own += 1
                return [*found, None], n_tokens
        return found, n_stored

    def end(self, request: Request, held: list[tuple[object, ...] | None]) -> None:
        """Enters the rest of a request, the only one that goes on from what is before it."""
        n_before, n_tokens = divmod(request.n_scheduled, BLOCK_SIZE)
        if request.cache_scope is None or not n_before or not n_tokens:
            return
        before = (request.cache_scope, *request.span(0, n_before * BLOCK_SIZE))
        for one in self.unused:
            if one[: len(before)] == before and 0 < len(one) - len(before) < BLOCK_SIZE:
                self.unused.remove(one)
                break
        rest = (request.cache_scope, *request.span(0, request.n_scheduled))
        held[n_before] = rest
        self.users[rest] = 1
        self.n_own -= 1

    def allocate(self, n_new: int) -> None:
        for _ in range(n_new):
            self.n_own += 1
            if self.n_own + len(self.users) + len(self.unused) > self.n_blocks:
                self.unused.pop(0)

    def release(self, held: Sequence[tuple[object, ...] | None]) -> None:
        for one in reversed(held):
            if one is None:
                self.n_own -= 1
            elif self.users[one] > 1:
                self.users[one] -= 1
            else:
                del self.users[one]
                self.unused.append(one)

    def enter(self, request: Request, held: list[tuple[object, ...] | None]) -> None:
        if request.cache_scope is None:
            return
        for index, one in enumerate(self.beginnings(request, request.n_scheduled)):
            if held[index] is None and one not in self.users and one not in self.unused:
                held[index] = one
                self.users[one] = 1
                self.n_own -= 1


@given(data=st.data(), n_blocks=st.integers(4, 14))
def test_blocks_are_those_of_an_obvious_model(data: st.DataObject, n_blocks: int) -> None:
    manager = KVManager(n_blocks=n_blocks, block_size=BLOCK_SIZE, has_prefix_cache=True)
    model = ObviousCache(n_blocks)
    admitted: dict[Request, tuple[Reservation, list[tuple[object, ...] | None]]] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["admit", "run", "run", "end"]))
        if what == "admit":
            n_tokens = data.draw(st.integers(1, 16))
            request = request_of(
                [*STEM[: data.draw(st.integers(0, n_tokens))], *[3] * 16][:n_tokens],
                max_new_tokens=data.draw(st.integers(1, 8)),
                scope=data.draw(st.sampled_from(SCOPES)),
            )
            reservation = manager.reserve(request)
            if reservation is not None:
                held, n_stored = model.admit(request)
                assert reservation.n_cached_columns == n_stored // BLOCK_SIZE
                assert request.n_scheduled == n_stored
                admitted[request] = (reservation, held)
        elif admitted:
            request = data.draw(st.sampled_from(list(admitted)))
            reservation, held = admitted[request]
            if what == "end":
                if data.draw(st.booleans()):
                    manager.enter_rest(request, reservation)
                    model.end(request, held)
                manager.release(reservation)
                model.release(held)
                del admitted[request]
            elif request.n_scheduled < request.n_tokens:
                request.n_scheduled = data.draw(
                    st.integers(request.n_scheduled + 1, request.n_tokens)
                )
                n_new = len(manager.allocate(reservation, request.n_scheduled))
                model.allocate(n_new)
                held += [None] * n_new
                manager.enter(request, reservation)
                model.enter(request, held)
        _check(manager, model, {request: one for request, (one, _) in admitted.items()})


def _check(
    manager: KVManager, model: ObviousCache, reservations: dict[Request, Reservation]
) -> None:
    """Checks that every block is free, in use or unused, and counted as what it is."""
    cache = manager.prefix_cache
    assert isinstance(cache, PrefixCache)
    in_use = [block for one in reservations.values() for block in one.block_ids]
    free, unused = set(manager.blocks._free), set(cache._unused)
    assert len(free) + len(unused) + len(set(in_use)) == manager.n_blocks
    assert free | unused | set(in_use) == set(range(manager.n_blocks))
    assert {block: in_use.count(block) for block in cache._n_users} == cache._n_users
    assert all(block in cache for block in in_use if in_use.count(block) > 1)
    assert cache.n_shared_blocks == sum(n > 1 for n in cache._n_users.values())
    assert len(cache) == len(unused) + len(cache._n_users)
    n_outstanding = sum(one.n_reserved_blocks - len(one.block_ids) for one in reservations.values())
    assert manager.n_reserved_blocks == len(set(in_use)) + n_outstanding <= manager.n_blocks
    assert n_outstanding <= len(free) + len(unused), "nobody who is admitted waits for memory"
    assert len(unused) == len(model.unused)
    assert sorted(cache._n_users.values()) == sorted(model.users.values())


# In whole schedulers


@dataclass(frozen=True)
class Coming:
    """A request to be, and when."""

    turn: int
    goes_on: bool
    """Whether its prompt begins with all that is known of the one before it."""
    n_stem: int
    n_own: int
    max_new_tokens: int
    stops: bool
    scope: bytes | None
    is_cancelled: bool


COMING = st.lists(
    st.builds(
        Coming,
        turn=st.integers(0, 12),
        goes_on=st.booleans(),
        n_stem=st.integers(0, 16),
        n_own=st.integers(1, 6),
        max_new_tokens=st.integers(1, 9),
        stops=st.booleans(),
        scope=st.sampled_from([b"", b"", b"", b"ann", None]),
        is_cancelled=st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@given(
    coming=COMING,
    data=st.data(),
    is_chunked=st.booleans(),
    token_hand_off=st.booleans(),
    pipeline_depth=st.integers(1, 4),
    n_blocks=st.integers(8, 24),
)
def test_whatever_is_skipped_is_stored_and_everybody_ends(
    coming: list[Coming],
    data: st.DataObject,
    is_chunked: bool,
    token_hand_off: bool,
    pipeline_depth: int,
    n_blocks: int,
) -> None:
    scheduler = build(
        max_batch_size=3,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        policy=(
            ChunkedPolicy(max_batch_size=3, max_batch_tokens=6)
            if is_chunked
            else OrcaPolicy(max_batch_size=3)
        ),
        has_prefix_cache=True,
    )
    memory = StoredTokens(generated_at, block_size=BLOCK_SIZE)
    in_flight: list[Batch] = []
    requests: list[Request] = []
    for turn in range(1000):
        for one in coming:
            if one.turn == turn:
                stem = STEM[: one.n_stem]
                if one.goes_on and requests:
                    stem = requests[-1].span(0, min(16, requests[-1].n_tokens))
                prompt = [*stem, *[3] * one.n_own]
                requests.append(
                    request_of(prompt, max_new_tokens=one.max_new_tokens, scope=one.scope)
                )
                requests[-1].stop_token_ids = frozenset({2} if one.stops else ())
                scheduler.submit(requests[-1])
                if one.is_cancelled and len(requests) > 1:
                    scheduler.cancel(requests[-2])
        batch = scheduler.select()
        if batch is not None:
            memory.run(batch)
            in_flight.append(batch)
        if in_flight and (batch is None or data.draw(st.booleans())):
            returned = in_flight.pop(0)
            scheduler.apply(returned.iteration, _tokens_of(returned))
        if turn > 12 and not len(scheduler.pool) and not in_flight:
            break
    assert not len(scheduler.pool)
    assert scheduler.kv_manager.n_reserved_slots == scheduler.kv_manager.n_allocated_slots == 0
    for request in requests:
        generated = list(request.generated_token_ids)
        first = len(request.prompt_token_ids)
        assert generated == [generated_at(request, first + i) for i in range(len(generated))]
