"""Drafts: where they come from, when they pay, and that they change nothing but the pace."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.drafting.drafter import NGRAMS, Drafter, look_up, n_leading_equal
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import TOKEN_ID, FinishReason, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import FIRST_PAUSE, Speculation
from tests.scheduler.core.invariants import check_batches, check_memory
from tests.scheduler.core.workload import PLAIN_TOKEN, STOP_TOKEN, Arrival, Driver, arrivals, build

GARBAGE = 99


def packed(tokens: Sequence[int]) -> bytes:
    return array(TOKEN_ID, tokens).tobytes()


def looked_up_slowly(tokens: Sequence[int], length: int) -> list[int]:
    """Returns the draft token by token: each follows the last place at which the end of the
    sequence occurred, or the next one after it."""
    for n in NGRAMS:
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                longer = list(tokens)
                for place in range(end, end + length):
                    longer.append(longer[place])
                return longer[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9))
def test_a_draft_is_what_followed_before(tokens: list[int], length: int) -> None:
    assert look_up(packed(tokens), length) == looked_up_slowly(tokens, length)


def test_bytes_between_two_tokens_are_no_tokens() -> None:
    # Shifted by a byte, the first four tokens look like the last three.
    shifted = [0x100, 0x200, 0x300, 0]
    assert look_up(packed([*shifted, 9, 1, 2, 3]), 2) == []
    assert look_up(packed([1, 2, 3, 8, *shifted, 9, 1, 2, 3]), 2) == [8, 0x100]


class ScriptedDrafts(Driver):
    """A perfect engine that samples nonsense after a wrong draft."""

    def return_oldest(self) -> None:
        batch = self.in_flight.pop(0)
        tokens = [token for span in batch.spans if span.is_sampled for token in self._tokens(span)]
        self.updates += self.scheduler.apply(batch.iteration, tokens)

    def _tokens(self, span: Span) -> list[int]:
        first = span.start_position + span.n_tokens - span.n_drafts
        right = [self._token_at(span.request, first + i) for i in range(span.n_drafts + 1)]
        drafts = span.token_ids[len(span.token_ids) - span.n_drafts :]
        n_right = n_leading_equal(drafts, right)
        return [*right[: n_right + 1], *[GARBAGE] * (span.n_drafts - n_right)]

    def _token_at(self, request: Request, position: int) -> int:
        arrival = self.arrivals[int(request.request_id)]
        n_generated = position - arrival.n_prompt + 1
        return STOP_TOKEN if n_generated == arrival.n_iterations else PLAIN_TOKEN


@given(
    requests=arrivals(
        with_cancellations=True, clients=("", "a", "b2"), priorities=(0, 0, 1), n_requests=16
    ),
    data=st.data(),
    is_fair=st.booleans(),
    max_batch_tokens=st.integers(6, 30),
    pipeline_depth=st.integers(1, 3),
    token_hand_off=st.booleans(),
    block_size=st.sampled_from([1, 4]),
    n_blocks=st.integers(21, 40),
    is_optimistic=st.booleans(),
    has_prefix_cache=st.booleans(),
)
def test_invariants_hold_whatever_is_drafted(
    requests: list[Arrival],
    data: st.DataObject,
    is_fair: bool,
    max_batch_tokens: int,
    pipeline_depth: int,
    token_hand_off: bool,
    block_size: int,
    n_blocks: int,
    is_optimistic: bool,
    has_prefix_cache: bool,
) -> None:
    tokens = st.lists(st.sampled_from([PLAIN_TOKEN, PLAIN_TOKEN, STOP_TOKEN, 5]), max_size=4)

    def propose(sequence: bytes, length: int) -> list[int]:
        return data.draw(tokens)[:length]

    scheduler = build(
        max_batch_size=6,
        n_blocks=n_blocks,
        block_size=block_size,
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        policy=ChunkedPolicy(
            max_batch_size=6,
            max_batch_tokens=max_batch_tokens,
            n_shares=1 if token_hand_off else pipeline_depth,
        ),
        order=Fair(ageing_s=30.0, now=lambda: 0.0) if is_fair else None,
        has_prefix_cache=has_prefix_cache,
        expected_use=ExpectedUse() if is_optimistic else None,
        drafter=Drafter(max_drafts=4, max_batch_tokens=max_batch_tokens, propose=propose),
    )
    driver = ScriptedDrafts(scheduler, requests)
    n_drafts = 0
    for _ in range(400):
        if driver.is_done:
            break
        driver.arrive()
        for request in driver.requests.values():
            request.speculation = request.speculation or Speculation(length=4)
        while (batch := driver.select()) is not None:
            check_memory(driver)
            check_batches(driver, max_batch_size=6)
            check_drafts(batch, max_batch_tokens=max_batch_tokens, block_size=block_size)
            n_drafts += batch.n_drafts
        if driver.in_flight:
            driver.return_oldest()
            check_memory(driver)
    assert driver.is_done
    drafter = scheduler.drafter
    assert drafter is not None
    assert drafter.n_accepted <= drafter.n_drafted <= n_drafts
    check_outputs(driver)
    while driver.in_flight:
        driver.return_oldest()
    assert scheduler.kv_manager.n_reserved_slots == scheduler.kv_manager.n_allocated_slots == 0


def check_drafts(batch: Batch, *, max_batch_tokens: int, block_size: int) -> None:
    """Checks that drafts find room in the batch, in the request's life and in its blocks."""
    if batch.n_drafts:
        assert sum(span.n_tokens for span in batch.spans) <= max_batch_tokens
    for span in batch.spans:
        end, reservation = span.start_position + span.n_tokens, span.request.reservation
        assert end <= span.request.max_sequence_len
        assert reservation is not None
        assert end <= len(reservation.block_ids) * block_size


def check_outputs(driver: Driver) -> None:
    """Checks that every request has got its own tokens, each told of once, and no more."""
    for index, request in driver.requests.items():
        n_iterations = driver.arrivals[index].n_iterations
        generated = list(request.generated_token_ids)
        expected = [*[PLAIN_TOKEN] * (n_iterations - 1), STOP_TOKEN]
        assert generated == expected[: len(generated)]
        updates = [update for update in driver.updates if update.request is request]
        if updates[-1].finish_reason is not FinishReason.CANCELLED:
            assert len(generated) == n_iterations
        told = [update for update in updates if update.token_id is not None]
        assert [update.token_id for update in told] == generated
        assert [update.n_generated for update in told] == list(range(1, len(told) + 1))


def one(prompt: list[int], *, max_new_tokens: int = 50) -> Request:
    return Request(RequestId("0"), prompt, max_new_tokens=max_new_tokens, speculation=Speculation())


def scheduler_for(*, token_hand_off: bool = True, max_batch_tokens: int = 16) -> Scheduler:
    return build(
        max_batch_size=8,
        n_blocks=200,
        block_size=4,
        pipeline_depth=2,
        token_hand_off=token_hand_off,
        policy=ChunkedPolicy(max_batch_size=8, max_batch_tokens=64),
        drafter=Drafter(max_drafts=8, max_batch_tokens=max_batch_tokens),
    )


def select(scheduler: Scheduler) -> Batch:
    batch = scheduler.select()
    assert batch is not None
    return batch


def test_a_request_with_a_draft_to_come_does_not_ride_ahead() -> None:
    scheduler, request = scheduler_for(), one([1, 2, 3, 4, 5, 6, 9])
    scheduler.submit(request)
    first, second = select(scheduler), select(scheduler)
    assert not second.spans[0].token_ids, "nothing has shown that drafts are to come"
    scheduler.apply(first.iteration, [1])
    third = select(scheduler)
    assert not third.spans[0].token_ids, "9, 1 has not occurred before"
    scheduler.apply(second.iteration, [2])
    assert scheduler.select() is None, "the third brings the token that is needed for a draft"
    scheduler.apply(third.iteration, [3])
    batch = select(scheduler)
    assert batch.spans[0].token_ids == [3, 4, 5, 6, 9]
    assert (batch.n_drafts, batch.spans[0].start_position) == (4, 9)
    assert scheduler.select() is None
    updates = scheduler.apply(batch.iteration, [4, 5, 7, 9, 2])
    assert [(u.token_id, u.n_generated) for u in updates] == [(4, 4), (5, 5), (7, 6)]
    batch = select(scheduler)
    assert (batch.spans[0].token_ids, batch.spans[0].start_position) == ([7], 12)


@pytest.mark.parametrize(("n_requests", "has_drafts"), [(1, True), (4, False)])
def test_a_batch_without_room_has_no_drafts(n_requests: int, has_drafts: bool) -> None:
    scheduler = scheduler_for(token_hand_off=False, max_batch_tokens=4)
    for _ in range(n_requests):
        scheduler.submit(one([1, 2, 3, 4, 1, 2]))
    batch = select(scheduler)
    scheduler.apply(batch.iteration, [3] * n_requests)
    assert (select(scheduler).n_drafts > 0) == has_drafts


def test_drafts_stop_where_they_are_wrong_and_are_tried_again_later() -> None:
    drafter = Drafter(max_drafts=8, max_batch_tokens=16)
    speculation = Speculation()
    n_tokens, tried_at = 100, []
    for n_tokens in range(100, 400):
        if drafter.pays(speculation, n_tokens, 4):
            tried_at.append(n_tokens)
            drafter.learn(speculation, 4, 0)
    pauses = [b - a for a, b in pairwise(tried_at) if b - a > 1]
    assert pauses[0] == FIRST_PAUSE + 1
    assert all(later > earlier for earlier, later in pairwise(pauses))
    assert len(tried_at) < 40


def test_the_more_requests_there_are_the_more_drafts_must_be_right() -> None:
    drafter = Drafter(max_drafts=8, max_batch_tokens=16)
    pays = [
        [drafter.pays(Speculation(acceptance=right), 100, n) for n in (1, 4, 8, 15, 16)]
        for right in (0.05, 0.3, 0.6, 1.0)
    ]
    assert [sum(of) for of in pays] == [0, 2, 3, 4]


def test_drafts_grow_while_they_are_right() -> None:
    drafter, speculation, lengths = Drafter(max_drafts=8, max_batch_tokens=16), Speculation(), []
    for n_right in (4, 8, 3, 4, 0):
        drafter.learn(speculation, max(n_right, speculation.length), n_right)
        lengths.append(speculation.length)
    assert lengths == [8, 8, 4, 8, 1]
    assert (drafter.n_drafted, drafter.n_accepted) == (4 + 8 + 8 + 4 + 8, 19)


def test_what_a_lost_epoch_was_drafting_is_forgotten() -> None:
    scheduler = scheduler_for(token_hand_off=False)
    request = one([1, 2, 3, 4, 1, 2])
    scheduler.submit(request)
    scheduler.apply(select(scheduler).iteration, [3])
    assert select(scheduler).n_drafts > 0
    scheduler.suspend()
    assert (request.drafts, request.n_tokens, request.n_unscheduled) == ((), 7, 7)


def test_who_goes_on_after_its_tokens_has_the_next_one_without_drafts() -> None:
    scheduler = build(
        max_batch_size=8,
        n_blocks=200,
        block_size=4,
        pipeline_depth=1,
        policy=ChunkedPolicy(max_batch_size=8, max_batch_tokens=8),
        drafter=Drafter(max_drafts=8, max_batch_tokens=8),
    )
    request = one([1, 2, 3, 4, 1, 2, 3])
    for token_id in (4, 1):
        request.accept(token_id)
    request.n_losses = 1
    scheduler.submit(request)
    scheduler.apply(select(scheduler).iteration, [])
    last_of_prefill = select(scheduler)
    assert (last_of_prefill.spans[0].n_tokens, last_of_prefill.n_drafts) == (1, 0)
    scheduler.apply(last_of_prefill.iteration, [2])
    assert request.is_suspect, "it has not been run as a decode"
    assert select(scheduler).n_drafts > 0
