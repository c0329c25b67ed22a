"""The iteration log: records, for whoever watches, of who rode, how long it took, how full the
memory was.

A record is complete when the result and the timings of all stages are in. Nothing is kept when
nobody watches, and a watcher that does not keep up is let go.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from orcinus.v1 import scheduler_pb2, worker_pb2

from services.common.errors import Unavailable
from services.scheduler.core.batch import Batch
from services.scheduler.core.scheduler import Scheduler, Update

MAX_PENDING = 4096
"""Records that wait for timings, and records that wait for a watcher, at most."""


class _Entry:
    """A record that is not complete yet."""

    def __init__(self, record: scheduler_pb2.WatchIterationsResponse, batch: Batch) -> None:
        self.record = record
        self.batch = batch
        self.started_ns = time.perf_counter_ns()
        self.is_returned = False
        self.timings: dict[int, worker_pb2.IterationTiming] = {}


class IterationLog:
    """An iteration observer that makes a record of each iteration, while somebody watches."""

    def __init__(self, *, epoch: int, n_stages: int) -> None:
        self._epoch = epoch
        self._n_stages = n_stages
        self._entries: dict[int, _Entry] = {}
        self._watchers: set[asyncio.Queue[scheduler_pb2.WatchIterationsResponse | None]] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[AsyncIterator[scheduler_pb2.WatchIterationsResponse]]:
        """Yields an iterator over the records of iterations that start inside the `with` block.

        The iterator raises `Unavailable` when the log is closed, or the watcher was too slow.
        """
        queue: asyncio.Queue[scheduler_pb2.WatchIterationsResponse | None] = asyncio.Queue()
        if self._is_closed:
            queue.put_nowait(None)
        self._watchers.add(queue)
        try:
            yield _records(queue)
        finally:
            self._watchers.discard(queue)

    def opened(self) -> None:
        """Notes nothing: the log is of iterations only."""

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        """Begins a record; `scheduler` is as the selection left it."""
        if not self._watchers:
            return
        record = scheduler_pb2.WatchIterationsResponse(
            epoch=self._epoch,
            iteration=batch.iteration,
            n_in_flight=scheduler.n_in_flight,
            n_waiting=scheduler.pool.n_waiting,
            n_running=scheduler.pool.n_running,
            n_reserved_slots=scheduler.kv_manager.n_reserved_slots,
            n_allocated_slots=scheduler.kv_manager.n_allocated_slots,
            n_slots=scheduler.kv_manager.n_slots,
        )
        record.start_time.GetCurrentTime()
        self._entries[batch.iteration] = _Entry(record, batch)
        if len(self._entries) > MAX_PENDING:
            del self._entries[next(iter(self._entries))]

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        """Adds the spans and the round trip of a batch that has been applied."""
        entry = self._entries.get(iteration)
        if entry is None:
            return
        ended = {update.request for update in updates if update.finish_reason is not None}
        entry.record.round_trip.FromNanoseconds(time.perf_counter_ns() - entry.started_ns)
        for span in entry.batch.spans:
            entry.record.spans.add(
                request_id=span.request.request_id,
                start_position=span.start_position,
                n_tokens=span.n_tokens,
                is_last=span.request in ended,
            )
        entry.is_returned = True
        self._emit_if_complete(iteration, entry)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        """Adds how a stage spent an iteration."""
        entry = self._entries.get(timing.iteration)
        if entry is not None:
            entry.timings[stage_index] = timing
            self._emit_if_complete(timing.iteration, entry)

    def closed(self, loss: str | None) -> None:
        """Ends all watches."""
        self._is_closed = True
        for queue in self._watchers:
            queue.put_nowait(None)

    def _emit_if_complete(self, iteration: int, entry: _Entry) -> None:
        if not entry.is_returned or len(entry.timings) < self._n_stages:
            return
        del self._entries[iteration]
        for stage_index in range(self._n_stages):
            timing = entry.timings[stage_index]
            stage = entry.record.stages.add()
            stage.receive.FromNanoseconds(timing.receive_ns)
            stage.compute.FromNanoseconds(timing.compute_ns)
            stage.send.FromNanoseconds(timing.send_ns)
        for queue in list(self._watchers):
            if queue.qsize() < MAX_PENDING:
                queue.put_nowait(entry.record)
            else:
                while not queue.empty():  # it may never be read
                    queue.get_nowait()
                queue.put_nowait(None)
                self._watchers.discard(queue)


async def _records(
    queue: asyncio.Queue[scheduler_pb2.WatchIterationsResponse | None],
) -> AsyncIterator[scheduler_pb2.WatchIterationsResponse]:
    while (record := await queue.get()) is not None:
        yield record
    raise Unavailable("no more records: the epoch is over, or the watcher is too slow")
