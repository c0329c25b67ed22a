"""The events of one call's answers, from their arrival until they are read.

While a client reads, the inbox is almost empty. If a client does not read, the tokens of each
answer are packed into arrays, which take little more memory than the numbers in them. The arrays
count against the memory budget for clients' data. If too many tokens are unread, the call ends.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from services.common import errors
from services.frontend.link.scheduler_events import Event, OutputTokens, PromptLogprobs
from services.frontend.request.logprobs import Logprobs
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusal, Refusals

MAX_LOOSE = 128
"""Largest number of unread events that are not packed and do not count against the memory budget. A
few iterations bring as many events."""

READ_AT_ONCE = 64
"""Number of tokens after which the reader pauses, so that other tasks run."""

N_LATE = 4
"""If at least this many events wait, the reader gets consecutive tokens of an answer as one
event."""

EVENT_BYTES = 256
"""Bytes of memory that an event takes."""

TOKEN_BYTES = array("I").itemsize

NUMBER_BYTES = 2 * TOKEN_BYTES
"""Bytes of memory that one log-probability takes, together with its token or rank. The
log-probabilities of a prompt are not counted here, because they are counted before they arrive."""

MAX_UNREAD_BYTES = 2**20
"""Largest memory of the unread events of one call, in bytes: some 80,000 tokens."""


class Inbox:
    """Queues the events of one call's answers for one reader."""

    __slots__ = (
        "_arrival",
        "_budget",
        "_error",
        "_events",
        "_max_loose",
        "_n_read",
        "_refusals",
        "_share",
        "is_awaited",
    )

    def __init__(self, budget: MemoryBudget, *, refusals: Refusals) -> None:
        self._events: deque[Event] = deque()
        self._max_loose = MAX_LOOSE
        self._n_read = 0  # tokens since the last pause
        self._arrival: asyncio.Future[None] | None = None  # while the reader waits
        self.is_awaited = False
        """Whether the reader has read all events and waits for the next one."""
        self._error: Exception | None = None
        self._budget = budget
        self._share = Share(budget)
        self._refusals = refusals

    @property
    def error(self) -> Exception | None:
        """Error that `get` raises when no event is left: too many tokens were unread, or the call
        was ended with an error. None if there is no error."""
        return self._error

    def put_nowait(self, event: Event) -> None:
        """Adds an event. If too many tokens are unread afterwards, all events are dropped and later
        events are ignored."""
        if self._error is not None:
            return
        self._events.append(event)
        if len(self._events) > self._max_loose:
            self._pack()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Drops all unread events and ignores later events. From now on `get` raises the error."""
        self._error = self._error or error
        self.close()
        self._wake()

    async def get(self) -> Event:
        """Waits for the next event and returns it. Only one task may wait. If several events are
        waiting already, consecutive tokens of one answer are returned as one event. So a slow
        reader has fewer events to process.

        Raises:
            PoolFull: too many tokens were unread.
            Exception: the error with which the call was ended.
        """
        if self._n_read >= READ_AT_ONCE:
            self._n_read = 0
            await asyncio.sleep(0)
        while not self._events:
            if self._error is not None:
                raise self._error
            self._n_read = 0
            self._arrival = asyncio.get_running_loop().create_future()
            self.is_awaited = True
            try:
                await self._arrival
            finally:
                self._arrival = None
                self.is_awaited = False
        event = self._events.popleft()
        if isinstance(event, OutputTokens):
            event = self._with_next(event)
            self._n_read += len(event.token_ids)
        else:
            self._n_read += 1
        if not self._events and self._share.n_bytes:
            self._count(MAX_LOOSE)
        return event

    def close(self) -> None:
        """Drops all unread events. A second call has no effect."""
        self._events.clear()
        self._count(MAX_LOOSE)

    def _with_next(self, tokens: OutputTokens) -> OutputTokens:
        """Returns `tokens`, joined with the tokens of the same answer that follow in the queue, up
        to READ_AT_ONCE tokens."""
        events = self._events
        if len(events) < N_LATE:
            return tokens
        parts, n_tokens = [tokens], len(tokens.token_ids)
        while events:
            following = events[0]
            if not isinstance(following, OutputTokens) or following.request_id != tokens.request_id:
                break
            n_tokens += len(following.token_ids)
            if n_tokens > READ_AT_ONCE:
                break
            parts.append(following)
            events.popleft()
        return tokens if len(parts) == 1 else _joined(parts)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self.is_awaited = False
            self._arrival.set_result(None)

    def _pack(self) -> None:
        """Joins the tokens of each answer into fewer events, and counts the unread events against
        the memory budget. If the budget has too little memory left, all unread events are dropped
        and the call ends with PoolFull."""
        self._events = deque(_packed(self._events))
        max_loose = max(MAX_LOOSE, 2 * len(self._events))
        n_bytes = sum(_n_bytes(event) for event in self._events if isinstance(event, OutputTokens))
        if not self._count(max_loose, n_bytes):
            self._refusals[Refusal.UNREAD] += 1
            self._error = errors.PoolFull("too much of the answers was not read")
            self.close()

    def _count(self, max_loose: int, n_token_bytes: int = 0) -> bool:
        """Makes this inbox's share of the memory budget large enough for `max_loose` unread events
        and `n_token_bytes` bytes of tokens. The first `MAX_LOOSE` events are not counted. Returns
        False, and changes nothing, if the budget has too little memory left or the share would
        exceed `MAX_UNREAD_BYTES`."""
        n_bytes = EVENT_BYTES * (max_loose - MAX_LOOSE) + n_token_bytes
        more = n_bytes - self._share.n_bytes
        if more > 0 and (n_bytes > MAX_UNREAD_BYTES or not self._budget.has_room(more)):
            return False
        if more > 0:
            self._share.grow(more)
        else:
            self._share.shrink(-more)
        self._max_loose = max_loose
        return True


def _n_bytes(tokens: OutputTokens) -> int:
    n_numbers = 0 if tokens.logprobs is None else tokens.logprobs.n_numbers
    return TOKEN_BYTES * len(tokens.token_ids) + NUMBER_BYTES * n_numbers


def _joined(parts: Sequence[OutputTokens]) -> OutputTokens:
    """Returns consecutive tokens of one answer as one event."""
    first = parts[0]
    token_ids = array("I", chain.from_iterable(part.token_ids for part in parts))
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    of_all = Logprobs.joined(logprobs) if logprobs else None
    return OutputTokens(first.request_id, token_ids, first.start, of_all, first.n_cached)


def _packed(events: Iterable[Event]) -> Iterator[Event]:
    """Yields the events, with consecutive tokens of one answer joined into events of up to
    READ_AT_ONCE tokens. The order of the events of one answer is kept. The order between answers is
    not."""
    firsts: dict[str, OutputTokens] = {}
    tokens: dict[str, array[int]] = {}
    logprobs: dict[str, list[Logprobs]] = {}
    ends: list[Event] = []
    for event in events:
        if isinstance(event, OutputTokens):
            firsts.setdefault(event.request_id, event)
            tokens.setdefault(event.request_id, array("I")).extend(event.token_ids)
            if event.logprobs is not None:
                logprobs.setdefault(event.request_id, []).append(event.logprobs)
        elif isinstance(event, PromptLogprobs):
            yield event  # comes before all tokens of its answer
        else:
            ends.append(event)
    for request_id, token_ids in tokens.items():
        first = firsts[request_id]
        of_all = Logprobs.joined(logprobs[request_id]) if request_id in logprobs else None
        for start in range(0, len(token_ids), READ_AT_ONCE):
            part = token_ids[start : start + READ_AT_ONCE]
            of_part = of_all and of_all.part(start, start + len(part))
            n_cached = 0 if start else first.n_cached
            yield OutputTokens(request_id, part, first.start + start, of_part, n_cached)
    yield from ends
