"""A `WatchService` that sends the events of a test, and records its watchers.

    watch = FakeWatch()
    scheduler = FakeScheduler(watch=watch)
    watch.tell(epoch(1), request(7, watch_pb2.REQUEST_TURN_WAITING))

Each new watch gets `first`, in one message, and then the events that are passed to `tell`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from orcinus.v1 import scheduler_pb2, watch_pb2

SERVICE = watch_pb2.DESCRIPTOR.services_by_name["WatchService"]

START_NS = 1_790_000_000 * 10**9
"""Default time of the first event, in nanoseconds since 1970."""


class FakeWatch:
    """The watches of one scheduler."""

    def __init__(self, *first: watch_pb2.WatchEvent) -> None:
        self.first: Sequence[watch_pb2.WatchEvent] = first or (epoch(1),)
        self.asked: list[bool] = []
        """For each watch so far, whether it asked for decisions."""
        self._outboxes: set[asyncio.Queue[watch_pb2.WatchResponse | None]] = set()
        self._changed = asyncio.Condition()

    @property
    def n_watchers(self) -> int:
        """Number of watches that are open."""
        return len(self._outboxes)

    def tell(self, *events: watch_pb2.WatchEvent) -> None:
        """Sends events to all watchers, in one message."""
        for outbox in self._outboxes:
            outbox.put_nowait(watch_pb2.WatchResponse(events=events))

    def end(self) -> None:
        """Ends all watches. Clients may begin new ones."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    async def wait_asked(self, n_watches: int = 1) -> list[bool]:
        """Waits until `n_watches` watches have begun. Returns, for each, whether it asked for
        decisions."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.asked) >= n_watches)
        return self.asked

    async def wait_watchers(self, n_watchers: int) -> None:
        """Waits until exactly `n_watchers` watches are open."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.n_watchers == n_watchers)

    async def Watch(
        self, request: watch_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[watch_pb2.WatchResponse]:
        """Handles the call of one watcher: yields the messages with events until `end` is
        called."""
        outbox: asyncio.Queue[watch_pb2.WatchResponse | None] = asyncio.Queue()
        outbox.put_nowait(watch_pb2.WatchResponse(events=self.first))
        await context.send_initial_metadata(())
        async with self._changed:
            self._outboxes.add(outbox)
            self.asked.append(request.has_decisions)
            self._changed.notify_all()
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            async with self._changed:
                self._outboxes.discard(outbox)
                self._changed.notify_all()


def epoch(
    number: int, *, at_s: float = 0.0, n_stages: int = 2, pipeline: int = 0
) -> watch_pb2.WatchEvent:
    """Returns the event that a pipeline serves."""
    told = watch_pb2.EpochEvent(
        epoch=number, model="test-model", n_stages=n_stages, pipeline=pipeline
    )
    return watch_pb2.WatchEvent(time_unix_ns=_ns(at_s), epoch=told)


def request(
    number: int,
    turn: watch_pb2.RequestTurn,
    *,
    at_s: float = 0.0,
    name: str = "",
    pipeline: int = 0,
) -> watch_pb2.WatchEvent:
    """Returns the event that a request has changed its state."""
    told = watch_pb2.RequestEvent(number=number, turn=turn, request_id=name, pipeline=pipeline)
    return watch_pb2.WatchEvent(time_unix_ns=_ns(at_s), request=told)


def ended(number: int, *, at_s: float = 0.0) -> watch_pb2.WatchEvent:
    """Returns the event that a request has ended."""
    event = request(number, watch_pb2.REQUEST_TURN_ENDED, at_s=at_s)
    event.request.reason = scheduler_pb2.COMPLETION_REASON_LENGTH
    return event


def iteration(
    number: int, *numbers: int, at_s: float = 0.0, epoch: int = 1, pipeline: int = 0
) -> watch_pb2.WatchEvent:
    """Returns the event that an iteration is complete, in which the requests `numbers` decoded."""
    told = watch_pb2.IterationEvent(
        epoch=epoch,
        pipeline=pipeline,
        iteration=number,
        sent_unix_ns=_ns(at_s),
        round_trip_ns=10**7,
        numbers=numbers,
        start_positions=[number] * len(numbers),
        n_tokens=[1] * len(numbers),
        kinds=[watch_pb2.SPAN_KIND_DECODE] * len(numbers),
        n_new_tokens=[1] * len(numbers),
        stages=[watch_pb2.StageTimes(start_ns=1000, compute_ns=5000)] * 2,
    )
    return watch_pb2.WatchEvent(time_unix_ns=_ns(at_s), iteration=told)


def pool(*waiting: int, at_s: float = 0.0) -> watch_pb2.WatchEvent:
    """Returns the event of a pool in which the requests `waiting` wait and none runs."""
    told = watch_pb2.PoolEvent(waiting=waiting, n_waiting=len(waiting))
    return watch_pb2.WatchEvent(time_unix_ns=_ns(at_s), pool=told)


def mark(
    text: str,
    *,
    at_s: float = 0.0,
    kind: watch_pb2.MarkKind = watch_pb2.MARK_KIND_LOST,
    epoch: int = 0,
) -> watch_pb2.WatchEvent:
    """Returns a mark with a text that explains the events around it."""
    told = watch_pb2.MarkEvent(kind=kind, text=text, epoch=epoch)
    return watch_pb2.WatchEvent(time_unix_ns=_ns(at_s), mark=told)


def decision(core: str, *, at_s: float = 0.0) -> watch_pb2.WatchEvent:
    """Returns the event with the settings `core` of a scheduling core."""
    told = watch_pb2.DecisionEvent(core=core)
    return watch_pb2.WatchEvent(time_unix_ns=_ns(at_s), decision=told)


def _ns(at_s: float) -> int:
    return START_NS + round(at_s * 1e9)
