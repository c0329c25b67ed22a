"""Shares of the event loop: of what clients cause, only a little begins in each pass of it.

A thousand requests that come at once, a thousand clients that hang up at once, or fifty that send
as fast as they can, would otherwise be dealt with in one pass, and no stream would get its tokens
before the last of them has been. What has no turn in this pass waits for a later one, in order;
in between the loop looks at everything else. Requests with and without a body, and large reads,
have shares of their own: nobody's request waits for what others upload, and no probe for what they
ask.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_AT_ONCE = 2
"""Turns of a share in one pass of the event loop: a request takes a millisecond until it waits for
the scheduler, and so may a large read."""


class LoopShares:
    """The shares of one server's connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requests = LoopShare(loop)
        """Requests that begin, and end because their client has gone."""
        self.lookups = LoopShare(loop)
        """Requests without a body that begin."""
        self.reads = LoopShare(loop)
        """Connections that read on, or parse on."""


class LoopShare:
    """One share, and who waits for a turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._n_taken = 0  # in this pass; its end is scheduled if there are any

    def take(self, work: Callable[[], None]) -> None:
        """Does the work now, or in a later pass if this one has had its share."""
        if self._n_taken < MAX_AT_ONCE and not self._waiting:
            self._do(work)
        else:
            self._waiting.append(work)

    def _do(self, work: Callable[[], None]) -> None:
        if not self._n_taken:
            self._loop.call_soon(self._begin_pass)
        self._n_taken += 1
        work()

    def _begin_pass(self) -> None:
        self._n_taken = 0
        while self._waiting and self._n_taken < MAX_AT_ONCE:
            self._do(self._waiting.popleft())
