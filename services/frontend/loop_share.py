"""Shares of the event loop. A share limits how much of the work that clients cause may begin in one
pass of the loop.

Without a limit, a thousand requests that arrive at once, a thousand clients that disconnect at
once, or fifty clients that send as fast as they can, would be handled in one pass, and no stream
would get its tokens before the end of the pass. Work beyond the share waits for a later pass, in
order of arrival; between passes the loop does all other work.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

MIN_AT_ONCE = 2
"""Smallest number of pieces of work that a share allows in one pass of the event loop, unless the
share sets another number."""

TURN_S = 0.004
"""Seconds of a pass of the event loop for each piece of work that a share may begin in the next
pass. A piece of work takes about a millisecond; it is, for example, a large read, or the work for a
request until it waits for the scheduler. So when passes are long because of many streams, a share
gets a quarter of the loop's time."""


class LoopShare:
    """Limits the pieces of work that may begin in one pass of the event loop. Work beyond the limit
    waits for a later pass."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        *,
        at_once: int = MIN_AT_ONCE,
        turn_s: float = TURN_S,
    ) -> None:
        """In each pass of the event loop, at least `at_once` pieces of work may begin. After a long
        pass, more pieces may begin in the next pass: one for each `turn_s` seconds that the long
        pass took."""
        self._loop = loop
        self._clock = clock
        self._at_once = at_once
        self._turn_s = turn_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._n_taken = 0  # work begun in this pass; if it is not 0, `_begin_pass` is scheduled
        self._n_allowed = at_once
        self._began_at = 0.0

    def take(self, work: Callable[[], None]) -> None:
        """Does the work now or, if the limit of this pass of the event loop is reached, in a later
        pass."""
        if not self._n_taken:  # nothing was taken in the last passes
            self._began_at, self._n_allowed = self._clock(), self._at_once
        if self._n_taken < self._n_allowed and not self._waiting:
            self._do(work)
        else:
            self._waiting.append(work)

    async def turn(self) -> None:
        """Waits until the share allows another piece of work. The work that the caller does after
        the wait counts as this piece."""
        come: asyncio.Future[None] = self._loop.create_future()
        self.take(partial(_end, come))
        await come

    def _do(self, work: Callable[[], None]) -> None:
        if not self._n_taken:
            self._loop.call_soon(self._begin_pass)
        self._n_taken += 1
        work()

    def _begin_pass(self) -> None:
        now = self._clock()
        self._n_allowed = max(self._at_once, int((now - self._began_at) / self._turn_s))
        self._began_at, self._n_taken = now, 0
        while self._waiting and self._n_taken < self._n_allowed:
            self._do(self._waiting.popleft())


def _end(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
