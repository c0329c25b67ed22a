"""The feed of viewers: converts the events of one subscription to changes in JSON, once for all
viewers.

A viewer is a client that watches the pipeline at work. Its stream begins with one of the following
objects, and so does each part of the stream after an interruption:

    {"type": "here"}     a scheduler is watched; the next objects replace all earlier objects
    {"type": "gap"}      changes are missing; the next objects replace all earlier objects
    {"type": "away"}     no scheduler is watched; `text` has the reason

After `here` or `gap` come the changes that `ViewState` keeps, and then new changes. Each viewer has
a queue. If a viewer lets the queue grow too long, the queued changes are dropped, and the stream
goes on after a gap when the viewer reads again.

The subscription lasts while there are viewers, and `LINGER_S` seconds longer, because pages are
often loaded again. The subscription includes decisions of the scheduling core only while a viewer
requests decisions. When the first such viewer comes, and when the last one has left, a new
subscription replaces the old one, and the other viewers get a `gap`. A viewer gets only the
decisions that are made after its stream began.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import pydantic_core
from orcinus.v1 import watch_pb2

from services.common import errors
from services.common.process import first_of
from services.common.watch_json import Json
from services.common.watch_view import View
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.watching.subscription import EventReceiver
from services.frontend.watching.view_state import ViewState

LINGER_S = 2.0
"""Seconds for which the subscription continues after the last viewer has left."""

MAX_UNSENT_BYTES = 512 * 2**10
"""Largest size, in bytes, of the new changes that wait to be sent to one viewer. A busy pipeline
makes this much in several seconds."""

TICK_S = 1.0
"""Seconds between two updates of the figures (totals and rates of the last minute) while the
scheduler sends no events."""

MAX_PIECE_BYTES = 64 * 2**10
"""Largest number of bytes that a viewer gets at a time, unless one change is larger."""

RETRY_AFTER_S = 10.0
"""Seconds after which a viewer that was refused may try again."""

STOPPING = "the server is stopping"


def as_json(value: Json) -> bytes:
    """Returns an object as one line of JSON in ASCII, which server-sent events need."""
    return pydantic_core.to_json(value, ensure_ascii=True, inf_nan_mode="null")


def note(kind: str, **fields: str) -> bytes:
    """Returns one of the feed's own objects (`here`, `gap` or `away`) as JSON, with the time of
    this machine."""
    return as_json({"t": round(time.time(), 6), "type": kind, **fields})


class Viewer:
    """A client that watches the pipeline, and the changes that wait to be sent to it."""

    def __init__(self, feed: "ViewFeed", *, wants_decisions: bool) -> None:
        self.wants_decisions = wants_decisions
        self.is_here = False
        """Whether the viewer's stream currently shows a scheduler that is watched: true after
        `here`, false after `away`."""
        self._feed = feed
        self._queue: deque[bytes] = deque()
        self._n_unsent = 0  # bytes of news
        self._is_behind = False
        self._is_over = False
        self._arrival = asyncio.Event()

    def greet(self, events: Iterable[bytes]) -> None:
        """Adds the objects with which the viewer's stream begins. They do not count against
        `MAX_UNSENT_BYTES`."""
        self._queue.extend(events)
        self._arrival.set()

    def put(self, events: Sequence[bytes], n_bytes: int) -> None:
        """Adds new changes to the queue. Together they have `n_bytes` bytes. If the queue becomes
        too long, drops all queued changes; the next call of the method `next` then begins with a
        `gap`."""
        if self._is_behind or not events:
            return
        self._n_unsent += n_bytes
        if self._n_unsent > MAX_UNSENT_BYTES:
            self._queue.clear()
            self._is_behind = True
        else:
            self._queue.extend(events)
        self._arrival.set()

    def end(self) -> None:
        """Ends the viewer's stream once the queued changes are sent."""
        self._is_over = True
        self._arrival.set()

    async def next(self) -> Sequence[bytes]:
        """Waits for changes, and returns at least one.

        Raises:
            Unavailable: this process is stopping.
        """
        while not (self._queue or self._is_behind):
            if self._is_over:
                raise errors.Unavailable(STOPPING)
            self._arrival.clear()
            await self._arrival.wait()
        if self._is_behind:
            self._is_behind = False
            self._n_unsent = 0
            self._queue.extend(self._feed.anew(self))
        return self._piece()

    def _piece(self) -> Sequence[bytes]:
        piece = [self._queue.popleft()]
        n_bytes = len(piece[0])
        while self._queue and n_bytes + len(self._queue[0]) <= MAX_PIECE_BYTES:
            piece.append(self._queue.popleft())
            n_bytes += len(piece[-1])
        self._n_unsent = max(0, self._n_unsent - n_bytes) if self._queue else 0
        return piece


class EventSource(Protocol):
    """The subscription from which the feed gets a scheduler's events."""

    def run(
        self, watcher: EventReceiver, *, has_decisions: bool
    ) -> Coroutine[Any, Any, NoReturn]: ...


class ViewFeed:
    """Sends the events of one subscription, as changes in JSON, to all viewers of a frontend. Keeps
    recent changes for viewers that connect later."""

    def __init__(
        self, subscription: EventSource, *, max_viewers: int, refusals: Refusals | None = None
    ) -> None:
        self._subscription = subscription
        self._max_viewers = max_viewers
        self._refusals = Refusals() if refusals is None else refusals
        self._viewers: set[Viewer] = set()
        self._view = View()
        self._state: ViewState | None = None  # while a scheduler is watched
        self._ahead_s: float | None = None
        """Seconds by which the scheduler's clock is ahead of the event loop's clock. None before
        the first event."""
        self._away = ""  # why no scheduler is watched, once that is known
        self._is_stopping = False
        self._has_decisions = False  # whether the subscription asks for decisions
        self._is_stale = False  # whether viewers want another subscription
        self._changed = asyncio.Event()

    @property
    def n_viewers(self) -> int:
        """Number of viewers."""
        return len(self._viewers)

    @contextmanager
    def viewer(self, *, wants_decisions: bool = False) -> Iterator[Viewer]:
        """Adds a viewer and yields it. Removes the viewer at the end of the context.

        Raises:
            PoolFull: there are too many viewers.
            Unavailable: this process is stopping.
        """
        if self._is_stopping:
            raise errors.Unavailable(STOPPING)
        if len(self._viewers) >= self._max_viewers:
            self._refusals[Refusal.VIEWERS] += 1
            raise errors.PoolFull("too many are watching", retry_after_s=RETRY_AFTER_S)
        viewer = Viewer(self, wants_decisions=wants_decisions)
        self._viewers.add(viewer)
        if wants_decisions and not self._has_decisions:
            self._is_stale = True  # the viewer hears of the watch that is about to begin
        elif self._state is not None:
            viewer.is_here = True
            viewer.greet((note("here"), *self._state.told()))
        if self._away:
            viewer.greet((note("away", text=self._away),))
        self._note_change()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if wants_decisions and not self._wants_decisions:
                self._is_stale = True
            self._note_change()

    def close(self) -> None:
        """Ends the streams of all viewers and accepts no more viewers."""
        self._is_stopping = True
        for viewer in self._viewers:
            viewer.end()

    async def run(self) -> None:
        """Watches the scheduler while there are viewers, until cancelled."""
        while True:
            while not self._viewers:
                await self._wait_change()
            self._is_stale = False
            self._has_decisions = self._wants_decisions
            watching = self._subscription.run(self, has_decisions=self._has_decisions)
            await first_of(watching, self._wait_unwanted(), self._keep_time())
            self._has_decisions = False
            self._state = None
            if not self._viewers:
                self._away = ""

    def anew(self, viewer: Viewer) -> Iterator[bytes]:
        """Yields the objects with which a viewer's stream begins again after a gap."""
        yield note("gap")
        viewer.is_here = self._state is not None
        if self._state is not None:
            yield from self._state.told()
        elif self._away:
            yield note("away", text=self._away)

    def opened(self) -> None:
        """Forgets the changes that were kept, because a stream of a scheduler's events begins.
        Sends `here` to the viewers, or `gap` to viewers that already see a scheduler."""
        self._view, self._state = View(), ViewState()
        self._away = ""
        self._ahead_s = None
        here, gap = note("here"), note("gap")
        for viewer in self._viewers:
            viewer.put((gap if viewer.is_here else here,), len(gap))
            viewer.is_here = True

    def received(self, events: Sequence[watch_pb2.WatchEvent]) -> None:
        """Converts new events to changes, keeps the changes, and sends them to the viewers."""
        known = [event for event in events if event.WhichOneof("event")]  # none of later versions
        self._tell(change for event in known for change in self._view.take(event))
        for event in known[-1:]:
            self._ahead_s = event.time_unix_ns / 1e9 - asyncio.get_running_loop().time()

    def _tell(self, changes: Iterable[Json]) -> None:
        assert self._state is not None, "changes come after a watch has begun"
        news: list[bytes] = []
        all_news: list[bytes] = []
        for change in changes:
            data = as_json(change)
            self._state.add(change, data)
            all_news.append(data)
            if change["type"] != "decision":
                news.append(data)
        n_bytes, n_all_bytes = sum(map(len, news)), sum(map(len, all_news))
        for viewer in self._viewers:
            if not viewer.is_here:
                continue  # the viewer waits for the watch that is about to begin
            if viewer.wants_decisions:
                viewer.put(all_news, n_all_bytes)
            else:
                viewer.put(news, n_bytes)

    def lost(self, reason: str) -> None:
        """Sends `away` to the viewers, because no scheduler is watched any more. Repeated calls
        send nothing."""
        self._state = None
        if self._away:
            return
        self._away = reason
        away = note("away", text=reason)
        for viewer in self._viewers:
            viewer.put((away,), len(away))
            viewer.is_here = False

    async def _keep_time(self) -> NoReturn:
        """Sends figures (totals and rates of the last minute) to the viewers while the scheduler
        sends no events, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._state is not None and self._ahead_s is not None:
                now = asyncio.get_running_loop().time() + self._ahead_s
                self._tell(self._view.advance(now))

    @property
    def _wants_decisions(self) -> bool:
        return any(viewer.wants_decisions for viewer in self._viewers)

    async def _wait_unwanted(self) -> None:
        """Waits until the subscription is to end: there have been no viewers for `LINGER_S`
        seconds, or another subscription, with or without decisions, must replace it."""
        while not self._is_stale:
            if self._viewers:
                await self._wait_change()
                continue
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._wait_change()
            except TimeoutError:
                return

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
