"""The scheduler's side of a connected frontend, without a socket."""

import pytest

from services.scheduler.connection import MAX_LOGPROB_BYTES, UPDATE_BYTES, Connection
from services.scheduler.core.batch import SpanLogprobs
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Update
from services.scheduler.settings import FRONTEND_BYTES


@pytest.mark.parametrize("n_bytes", [0, 250, 1000, 100_000])
async def test_what_waits_for_a_frontend_is_bounded_in_bytes_whatever_it_is(n_bytes: int) -> None:
    connection = Connection()
    request = Request(RequestId("x" * 40), [1], 10**6)
    n_taken = n_waiting = 0
    while not connection.is_overfull.is_set():
        connection.check_unsent()
        logprobs = SpanLogprobs(bytes(n_bytes)) if n_bytes else None
        connection.update(Update(request, 5, None, n_waiting + 1, logprobs=logprobs))
        n_waiting += 1
        if n_waiting == 10 and not n_taken:  # what was taken counts no more
            n_taken, n_waiting = len((await connection.next_message()).tokens), 0
            assert n_taken == 10
    n_needed = FRONTEND_BYTES // (UPDATE_BYTES + n_bytes)
    assert n_needed - 10 <= n_waiting <= n_needed + 2
    while n_waiting:
        n_waiting -= len((await connection.next_message()).tokens)


async def test_one_iteration_is_never_too_much_for_a_frontend_that_reads() -> None:
    connection = Connection()
    request = Request(RequestId("a"), [1], 8)
    large = tuple((1 + i, bytes(MAX_LOGPROB_BYTES)) for i in range(8))
    connection.check_unsent()
    connection.update(Update(request, 5, None, 1, logprobs=SpanLogprobs(b"", large)))
    assert not connection.is_overfull.is_set()
    n_read = 0
    while n_read < 8:
        n_read += sum(len(one.prompt_logprobs) for one in (await connection.next_message()).tokens)
    connection.check_unsent()
    assert not connection.is_overfull.is_set()
