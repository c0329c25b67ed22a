"""The scheduler's side of a connected frontend, without a socket."""

import asyncio

import pytest

from services.common import watchdog
from services.scheduler.core.batch import Update
from services.scheduler.core.request import FinishReason, Request, RequestId
from services.scheduler.core.span_logprobs import SpanLogprobs
from services.scheduler.frontend_stream import (
    ACCEPTANCE_S,
    MAX_LOGPROB_BYTES,
    UPDATE_BYTES,
    FrontendStream,
)
from services.scheduler.settings import FRONTEND_BYTES
from tests.limits import HANG_S


@pytest.mark.parametrize("n_bytes", [0, 250, 1000, 100_000])
async def test_what_waits_for_a_frontend_is_bounded_in_bytes_whatever_it_is(n_bytes: int) -> None:
    connection = FrontendStream()
    request = Request(RequestId("x" * 40), [1], 10**6)
    n_taken = n_waiting = 0
    while not connection.is_overfull.is_set():
        connection.check_unsent()
        logprobs = SpanLogprobs(bytes(n_bytes)) if n_bytes else None
        connection.update([Update(request, 5, None, n_waiting + 1, logprobs=logprobs)])
        n_waiting += 1
        if n_waiting == 10 and not n_taken:  # what was taken counts no more
            n_taken, n_waiting = len((await connection.next_message()).tokens), 0
            assert n_taken == 10
    n_needed = FRONTEND_BYTES // (UPDATE_BYTES + n_bytes)
    assert n_needed - 10 <= n_waiting <= n_needed + 2
    while n_waiting:
        n_waiting -= len((await connection.next_message()).tokens)


async def test_one_iteration_is_never_too_much_for_a_frontend_that_reads() -> None:
    connection = FrontendStream()
    request = Request(RequestId("a"), [1], 8)
    large = tuple((1 + i, bytes(MAX_LOGPROB_BYTES)) for i in range(8))
    connection.check_unsent()
    connection.update([Update(request, 5, None, 1, logprobs=SpanLogprobs(b"", large))])
    assert not connection.is_overfull.is_set()
    n_read = 0
    while n_read < 8:
        n_read += sum(len(one.prompt_logprobs) for one in (await connection.next_message()).tokens)
    connection.check_unsent()
    assert not connection.is_overfull.is_set()


async def test_a_message_that_is_full_amid_an_iteration_loses_nothing() -> None:
    connection = FrontendStream()
    requests = [Request(RequestId(name), [1], 8) for name in "abc"]
    for number, request in enumerate(requests, start=1):
        connection.accept(request, number)
    large = SpanLogprobs(b"", ((1, bytes(MAX_LOGPROB_BYTES)), (2, bytes(MAX_LOGPROB_BYTES))))
    logprobs = (None, large, None)
    pairs = zip(requests, logprobs, strict=True)
    connection.update([Update(one, 5, None, 2, logprobs=said) for one, said in pairs])
    came = list[int]()
    while len(came) < 2:
        came += (await asyncio.wait_for(connection.next_message(), HANG_S)).columns.numbers
    assert came == [1, 3]


async def test_tokens_after_the_first_come_in_columns_each_requests_together() -> None:
    connection = FrontendStream()
    requests = [Request(RequestId(name), [1], 8, n_cached_tokens=1) for name in "abc"]
    for number, request in zip((7, 9, None), requests, strict=True):
        connection.accept(request, number)
    for n_generated in (1, 2, 3):
        for request in requests:
            connection.update([Update(request, 10 * n_generated, None, n_generated)])
    connection.update([Update(requests[1], 40, FinishReason.LENGTH, 4)])
    message = await connection.next_message()
    firsts = [(one.request_id, one.start, one.n_cached_tokens) for one in message.tokens]
    assert firsts == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("c", 1, 0), ("c", 2, 0)]
    columns = message.columns
    assert list(columns.numbers) == [7, 9]
    assert list(columns.starts) == [1, 1]
    assert list(columns.n_tokens) == [2, 3]
    assert list(columns.token_ids) == [20, 30, 20, 30, 40]
    assert [one.request_id for one in message.completed] == ["b"]


async def test_a_frontend_may_stand_still_for_as_long_as_its_watchdog_lets_it() -> None:
    connection = FrontendStream()
    requests = [Request(RequestId(str(number)), [1], 1000) for number in range(256)]
    for number, request in enumerate(requests):
        connection.accept(request, number)
    n_iterations = int(40 * watchdog.LIMIT_S)  # 10,000 tokens a second
    for n_generated in range(2, 2 + n_iterations):
        connection.check_unsent()
        connection.update([Update(each, n_generated, None, n_generated) for each in requests])
    assert not connection.is_overfull.is_set()
    columns = (await connection.next_message()).columns
    assert list(columns.numbers) == list(range(256))
    assert set(columns.starts) == {1}
    assert set(columns.n_tokens) == {n_iterations}
    assert list(columns.token_ids) == [*range(2, 2 + n_iterations)] * 256
    connection.update([Update(requests[0], 5, None, 2 + n_iterations)])
    assert list((await connection.next_message()).columns.token_ids) == [5]


async def test_columns_of_before_a_loss_are_sent_before_it() -> None:
    connection = FrontendStream()
    request = Request(RequestId("a"), [1], 8)
    connection.accept(request, 0)
    connection.update([Update(request, 5, None, 2)])
    connection.close()
    connection.suspend(request)
    assert list((await connection.next_message()).columns.token_ids) == [5]
    after = await connection.next_message()
    assert after.is_closed
    assert not after.HasField("columns")
    assert [one.request_id for one in after.suspended] == ["a"]


async def test_an_acceptance_leaves_with_the_next_tokens_and_alone_when_none_come() -> None:
    connection = FrontendStream()
    first, second = (Request(RequestId(name), [1], 8) for name in "ab")
    connection.accept(first, 1)
    alone = await asyncio.wait_for(connection.next_message(), HANG_S)
    assert ([one.request_id for one in alone.accepted], len(alone.tokens)) == (["a"], 0)

    connection.accept(second, 2)
    reading = asyncio.create_task(connection.next_message())
    await asyncio.sleep(0)
    assert not reading.done()
    connection.update([Update(first, 5, None, 1)])
    together = await asyncio.wait_for(reading, HANG_S)
    assert [one.request_id for one in together.accepted] == ["b"]
    assert [one.request_id for one in together.tokens] == ["a"]
    # What was waited for has left: nothing else is to be sent.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connection.next_message(), 3 * ACCEPTANCE_S)


async def test_only_requests_that_ask_for_traits_get_them_and_at_each_admission() -> None:
    connection = FrontendStream()
    plain, asking = (Request(RequestId(name), [1], 8, build="b1") for name in "pa")
    connection.accept(plain)
    connection.accept(asking, wants_traits=True)
    for is_new in (True, False):
        for request in (plain, asking):
            connection.note_build(
                request, is_new=is_new, traits_of=lambda build: {"dtype": f"of {build}"}
            )
    message = await connection.next_message()
    told = [(built.request_id, built.build, dict(built.traits)) for built in message.builds]
    traits = {"dtype": "of b1"}
    assert told == [("p", "b1", {}), ("a", "b1", traits), ("a", "b1", traits)]
