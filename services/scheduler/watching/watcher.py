"""A watcher: the events that wait to be sent to it. A message collects the events of a tenth of a
second."""

import asyncio
from collections import deque

from orcinus.v1 import watch_pb2

from services.common.errors import Unavailable

BATCH_S = 0.1
"""Seconds for which a message waits for further events."""

MAX_PENDING_BYTES = 16 * 2**20
"""Largest number of bytes of the events that wait to be sent to a watcher. An event that waits for
several watchers is in memory once."""

MAX_MESSAGE_BYTES = 2**19
"""Bytes of events in a message after which another message begins; gRPC accepts messages eight
times as large."""

EVENT_BYTES = 200
"""Bytes counted for each event in addition to its content."""


class Watcher:
    """Keeps the events for one watcher until they are sent. If the watcher reads too slowly, its
    watch ends."""

    def __init__(
        self,
        *,
        has_decisions: bool = False,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        batch_s: float = BATCH_S,
    ) -> None:
        self.has_decisions = has_decisions
        """Whether the watcher gets decisions in addition to other events."""
        self.is_gone = False
        """Whether the watch has ended."""
        self._max_pending_bytes = max_pending_bytes
        self._batch_s = batch_s
        self._pending: deque[tuple[watch_pb2.WatchEvent, int]] = deque()
        self._n_pending_bytes = 0
        self._has_news = asyncio.Event()
        self._is_over = asyncio.Event()
        self._end = ""

    @property
    def n_pending(self) -> int:
        """Number of events that wait to be sent."""
        return len(self._pending)

    def put(self, event: watch_pb2.WatchEvent, n_bytes: int) -> None:
        """Adds an event of `n_bytes` bytes to the events that wait to be sent. If too many bytes
        wait already, ends the watch instead."""
        if self.is_gone:
            return
        n_bytes += EVENT_BYTES
        if self._n_pending_bytes + n_bytes > self._max_pending_bytes and self._pending:
            self._pending.clear()  # a slow watcher may never read the events
            self._n_pending_bytes = 0
            self.end("the watcher does not keep up")
            return
        self._pending.append((event, n_bytes))
        self._n_pending_bytes += n_bytes
        self._has_news.set()

    def end(self, reason: str) -> None:
        """Ends the watch. Events that wait are still sent."""
        if not self.is_gone:
            self.is_gone, self._end = True, reason
            self._is_over.set()
            self._has_news.set()

    async def next_message(self) -> watch_pb2.WatchResponse:
        """Waits for an event, and then `batch_s` for further events. Returns the events in order.

        Raises:
            Unavailable: the watch has ended. The message says why.
        """
        await self._has_news.wait()
        if self._n_pending_bytes < MAX_MESSAGE_BYTES and not self.is_gone:
            await self._until_over(self._batch_s)
        message, n_bytes = watch_pb2.WatchResponse(), 0
        while self._pending and n_bytes < MAX_MESSAGE_BYTES:
            event, n_its = self._pending.popleft()
            message.events.append(event)
            n_bytes += n_its
        self._n_pending_bytes -= n_bytes
        if not n_bytes:
            raise Unavailable(self._end)
        if not self._pending and not self.is_gone:
            self._has_news.clear()
        return message

    async def _until_over(self, time_s: float) -> None:
        try:
            async with asyncio.timeout(time_s):
                await self._is_over.wait()
        except TimeoutError:
            return
