"""What is unread takes little memory, and not too much of it."""

import asyncio

import pytest

from services.common import errors
from services.frontend.generation.inbox import (
    MAX_LOOSE,
    MAX_UNREAD_BYTES,
    N_LATE,
    READ_AT_ONCE,
    Inbox,
)
from services.frontend.link.scheduler_events import Completed, Event, OutputTokens
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import Logprobs
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals
from tests import fake_scheduler
from tests.frontend.conftest import soon

N_TOKENS = 10 * MAX_LOOSE


def logprobs_of(token_ids: list[int]) -> Logprobs:
    return Logprobs.parse(fake_scheduler.logprobs_of(token_ids, 2))


def inbox_in(budget: MemoryBudget) -> tuple[Inbox, Refusals]:
    refusals = Refusals()
    return Inbox(budget, refusals=refusals), refusals


async def test_unread_tokens_come_in_order_and_before_their_end() -> None:
    budget = MemoryBudget(2**20)
    inbox, refusals = inbox_in(budget)
    for token_id in range(N_TOKENS):
        for name in ("a", "b"):
            n_cached = 0 if token_id else 5
            inbox.put_nowait(OutputTokens(name, (token_id,), 7 + token_id, None, n_cached))
    inbox.put_nowait(Completed("a", FinishReason.STOP))
    inbox.put_nowait(Completed("b", FinishReason.LENGTH))
    for token_id in range(2 * MAX_LOOSE):
        inbox.put_nowait(OutputTokens("c", (token_id,), token_id))
    assert 4 * 2 * N_TOKENS < budget.n_bytes < 40 * 2 * N_TOKENS
    read: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    ended: list[Event] = []
    while len(ended) < 2 or len(read["c"]) < 2 * MAX_LOOSE:
        event = await soon(inbox.get())
        if isinstance(event, OutputTokens):
            assert not any(end.request_id == event.request_id for end in ended)
            assert len(event.token_ids) <= READ_AT_ONCE
            if event.request_id != "c":
                assert event.start == 7 + len(read[event.request_id])
                assert event.n_cached == (0 if read[event.request_id] else 5)
            read[event.request_id] += event.token_ids
        else:
            ended.append(event)
    assert read["a"] == read["b"] == list(range(N_TOKENS))
    assert budget.n_bytes == 0
    assert refusals[Refusal.UNREAD] == 0


async def test_tokens_of_one_answer_that_are_there_come_together() -> None:
    inbox, _ = inbox_in(MemoryBudget(2**20))
    told = [logprobs_of([token_id]) for token_id in range(3)]
    inbox.put_nowait(OutputTokens("a", (0,), 7, told[0], 5))
    inbox.put_nowait(OutputTokens("a", (1, 2), 8, Logprobs.joined(told[1:])))
    inbox.put_nowait(OutputTokens("b", (3,), 0))
    inbox.put_nowait(OutputTokens("a", (4,), 10))
    inbox.put_nowait(Completed("a", FinishReason.STOP))
    first = await soon(inbox.get())
    assert isinstance(first, OutputTokens)
    assert (first.request_id, list(first.token_ids)) == ("a", [0, 1, 2])
    assert (first.start, first.n_cached) == (7, 5)
    assert first.logprobs == Logprobs.joined(told)
    assert await soon(inbox.get()) == OutputTokens("b", (3,), 0)
    assert await soon(inbox.get()) == OutputTokens("a", (4,), 10)
    assert await soon(inbox.get()) == Completed("a", FinishReason.STOP)


async def test_a_reader_who_is_hardly_late_gets_tokens_as_they_came() -> None:
    inbox, _ = inbox_in(MemoryBudget(2**20))
    sent = [OutputTokens("a", (token_id,), token_id) for token_id in range(N_LATE)]
    for tokens in sent:
        inbox.put_nowait(tokens)
    assert [await soon(inbox.get()) for _ in sent] == sent


async def test_no_more_tokens_come_together_than_are_read_at_once() -> None:
    inbox, _ = inbox_in(MemoryBudget(2**20))
    n_tokens = READ_AT_ONCE + 3
    for token_id in range(n_tokens):
        inbox.put_nowait(OutputTokens("a", (token_id,), token_id))
    lengths: list[int] = []
    while sum(lengths) < n_tokens:
        event = await soon(inbox.get())
        assert isinstance(event, OutputTokens)
        lengths.append(len(event.token_ids))
    assert lengths == [READ_AT_ONCE, 1, 1, 1]


@pytest.mark.parametrize("max_bytes", [20_000, 2**30], ids=["budget", "call"])
async def test_too_much_unread_ends_the_call(max_bytes: int) -> None:
    budget = MemoryBudget(max_bytes)
    inbox, refusals = inbox_in(budget)
    n_put = 0
    while inbox.error is None:
        inbox.put_nowait(OutputTokens("a", (1,), n_put))
        n_put += 1
        assert n_put <= MAX_UNREAD_BYTES
        assert budget.n_bytes <= min(max_bytes, MAX_UNREAD_BYTES)
    assert n_put > (max_bytes if max_bytes < 2**20 else MAX_UNREAD_BYTES) / 40
    assert budget.n_bytes == 0
    assert refusals[Refusal.UNREAD] == 1
    with pytest.raises(errors.PoolFull, match="not read"):
        await soon(inbox.get())


async def test_reader_that_has_much_to_read_lets_others_in() -> None:
    inbox, _ = inbox_in(MemoryBudget(2**30))
    for token_id in range(N_TOKENS):
        inbox.put_nowait(OutputTokens("a", (token_id,), token_id))
    n_turns, n_read = 0, 0

    async def tick() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    while n_read < N_TOKENS:
        event = await soon(inbox.get())
        assert isinstance(event, OutputTokens)
        n_read += len(event.token_ids)
    ticking.cancel()
    assert n_turns >= N_TOKENS // READ_AT_ONCE - 3


async def test_reader_that_is_cancelled_loses_nothing() -> None:
    inbox, _ = inbox_in(MemoryBudget(2**20))
    waiting = asyncio.ensure_future(inbox.get())
    await asyncio.sleep(0)
    inbox.put_nowait(OutputTokens("a", (1,), 0))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    event = await soon(inbox.get())
    assert isinstance(event, OutputTokens)
    assert event.token_ids == (1,)
