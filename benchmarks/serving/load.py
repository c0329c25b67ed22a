"""Open-loop load: each request is sent when it is due, whether or not earlier requests have ended.

A client implements a protocol. This module sends each request when it is due, and records the
received answers. An answer counts as failed if its length is not the requested length, since runs
with other lengths could not be compared.
"""

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.records import RequestRecord
from benchmarks.workload import PlannedRequest

LEAD_S = 0.05
"""Seconds from the call of `run` to the first arrival, so that even the first request is sent on
time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of an answer that were received together, and the time of the event loop, in seconds,
    at which they were received."""

    time_s: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The whole reply to a request. Has the server's own token counts if the server returns
    them."""

    answers: tuple[Answer, ...]
    n_prompt: int | None = None
    n_output: int | None = None
    error: str | None = None


class Call(Protocol):
    """A prepared request that can be sent once."""

    async def send(self) -> None:
        """Sends the request and waits for the end of the answer. Raises OSError if the connection
        fails."""

    def read(self) -> Reply:
        """Parses the received part of the reply and returns it."""


class Client(Protocol):
    """A client of a server, for one protocol."""

    def prepare(self, request: PlannedRequest) -> Call:
        """Returns a call for a request. As much work as possible is done here, before the run
        begins."""


async def run(
    client: Client,
    requests: Sequence[PlannedRequest],
    *,
    timeout_s: float = 600.0,
    on_done: Callable[[], object] = lambda: None,
) -> list[RequestRecord]:
    """Sends all requests when they are due, waits for all answers, and returns the records of the
    requests.

    Args:
        timeout_s: seconds after which a request counts as failed.
        on_done: called at the end of each request, successful or not.
    """
    calls = [client.prepare(request) for request in requests]
    with _no_garbage_collection():
        start = asyncio.get_running_loop().time() + LEAD_S
        sent = await asyncio.gather(
            *(
                _send(call, start + request.arrival_s, timeout_s, on_done)
                for call, request in zip(calls, requests, strict=True)
            )
        )
    return [
        _record(request, times, call.read(), start)
        for request, call, times in zip(requests, calls, sent, strict=True)
    ]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switches Python's garbage collector off inside the context. A full collection takes 50 to 100
    ms, which would count as the server's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True)
class _Times:
    """The times at which a call was sent and ended, and its error, if any."""

    start_s: float
    end_s: float
    error: str | None = None


async def _send(call: Call, due: float, timeout_s: float, on_done: Callable[[], object]) -> _Times:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(due - loop.time())
    start_s, error = loop.time(), None
    try:
        async with asyncio.timeout(timeout_s):
            await call.send()
    except TimeoutError:
        error = f"no end after {timeout_s:g} s"
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}"
    on_done()
    return _Times(start_s, loop.time(), error)


def _record(request: PlannedRequest, times: _Times, reply: Reply, start: float) -> RequestRecord:
    token_times = tuple(
        itertools.chain.from_iterable(
            itertools.repeat(answer.time_s - start, answer.n_tokens) for answer in reply.answers
        )
    )
    n_output = len(token_times) if reply.n_output is None else reply.n_output
    error = times.error or reply.error
    if error is None and n_output != request.n_output:
        error = f"{n_output} tokens instead of {request.n_output}"
    return RequestRecord(
        arrival_s=request.arrival_s,
        start_s=times.start_s - start,
        first_token_s=token_times[0] if token_times else None,
        end_s=token_times[-1] if token_times and error is None else times.end_s - start,
        n_prompt=request.n_prompt if reply.n_prompt is None else reply.n_prompt,
        n_output=n_output,
        token_times_s=token_times if len(token_times) == n_output else (),
        error=error,
    )
