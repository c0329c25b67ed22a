"""Limits output that a client does not read. Unread output counts against the memory budget, and
the client has limited time to read it.

While a client reads fast enough, nothing is done. The transport reports when its buffer exceeds the
high-water mark of 64 KiB. From then until the buffer is nearly empty, a timer checks every
`limit_s` seconds whether at least `MIN_READ_BYTES` have left the buffer. If not, the connection is
aborted. So a client that reads a byte now and then is treated like a client that reads nothing.
"""

import asyncio
from collections.abc import Callable

from services.common import errors
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals

MIN_READ_BYTES = 16 * 2**10
"""Number of bytes that a slow client must read in each `limit_s` seconds."""


class UnreadOutput:
    """Watches the unread output of one connection, and aborts the connection of a client that reads
    too slowly."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        loop: asyncio.AbstractEventLoop,
        *,
        limit_s: float,
        budget: MemoryBudget,
        refusals: Refusals,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._limit_s = limit_s
        self._share = budget.share()
        self._refusals = refusals
        self._timer: asyncio.Handle | None = None
        self._is_stalled = False

    def begin(self) -> None:
        """Begins the watch. Called when the buffer of the transport exceeds the high-water mark."""
        self._is_stalled = True
        try:
            self._share.grow(self._transport.get_write_buffer_size())
        except errors.PoolFull:  # the budget has no memory left for unread output
            # The transport is in the middle of a write, so it is aborted afterwards.
            self._timer = self._loop.call_soon(self._give_up)
        else:
            self._wait(self._check)

    def end(self) -> None:
        """Ends the watch. Called when the buffer is nearly empty."""
        self._is_stalled = False
        self._cancel()
        if self._transport.is_closing():
            self.closing()

    def closing(self) -> None:
        """Limits the time in which the client must read the rest of the buffer. Called when the
        transport is closing and waits for the buffer to be empty."""
        if not self._is_stalled and self._transport.get_write_buffer_size():
            self._wait(self._give_up)

    def close(self) -> None:
        """Ends the watch for good. Called when the connection is lost."""
        self._cancel()

    def _check(self) -> None:
        n_unread = self._transport.get_write_buffer_size()
        n_read = self._share.n_bytes - n_unread
        if n_read < MIN_READ_BYTES:
            self._give_up()
            return
        self._share.shrink(n_read)
        self._wait(self._check)

    def _give_up(self) -> None:
        self._cancel()
        self._refusals[Refusal.UNREAD] += 1
        self._transport.abort()

    def _wait(self, then: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(self._limit_s, then)

    def _cancel(self) -> None:
        self._share.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
