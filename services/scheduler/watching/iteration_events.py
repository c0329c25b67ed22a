"""Makes the events of iterations: their requests, their durations, and the use of memory.

The event is sent when the result of the iteration and the timings of all stages have arrived.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from orcinus.v1 import watch_pb2, worker_pb2

from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.stage_starts import StageStarts, StageTime
from services.scheduler.watching.told_requests import ToldRequest, ToldRequests

MAX_PENDING = 4096
"""Maximum number of iterations that wait for the timings of their stages."""


@dataclass(slots=True)
class _Entry:
    """An iteration whose result, or whose timing from some stage, has not come yet."""

    event: watch_pb2.IterationEvent
    batch: Batch
    sent_ns: int
    is_returned: bool = False
    timings: dict[int, worker_pb2.IterationTiming] = field(default_factory=dict)


class IterationTeller:
    """Sends watchers an event about each iteration of one epoch."""

    def __init__(
        self,
        audience: Audience,
        told: ToldRequests,
        *,
        epoch: int,
        pipeline: int,
        n_stages: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._audience = audience
        self._told = told
        self._epoch = epoch
        self._pipeline = pipeline
        self._n_stages = n_stages
        self._clock_ns = clock_ns
        self._entries: dict[int, _Entry] = {}
        self._starts = StageStarts(n_stages)

    @property
    def n_pending(self) -> int:
        """Number of iterations whose result, or whose timing from some stage, has not come yet."""
        return len(self._entries)

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        """Begins the event of an iteration that is about to be sent. `scheduler` is in its state
        after the selection of the batch."""
        if not self._audience.is_there:
            return
        kv_manager, pool = scheduler.kv_manager, scheduler.pool
        spans = batch.spans
        told = [self._told.of(span.request) for span in spans]
        event = watch_pb2.IterationEvent(
            epoch=self._epoch,
            pipeline=self._pipeline,
            iteration=batch.iteration,
            sent_unix_ns=self._audience.wall_ns(),
            numbers=[one.number for one in told],
            start_positions=[span.start_position for span in spans],
            n_tokens=[span.n_tokens for span in spans],
            kinds=[_kind(span, one) for span, one in zip(spans, told, strict=True)],
            n_in_flight=scheduler.n_in_flight,
            n_waiting=pool.n_waiting,
            n_running=pool.n_running,
            n_reserved_slots=kv_manager.n_reserved_slots,
            n_allocated_slots=kv_manager.n_allocated_slots,
            n_shared_slots=kv_manager.n_shared_slots,
            n_cached_slots=kv_manager.n_unused_slots,
        )
        for span, one in zip(spans, told, strict=True):
            one.n_computed = span.start_position + span.n_tokens - span.n_drafts
        self._entries[batch.iteration] = _Entry(event, batch, self._clock_ns())
        if len(self._entries) > MAX_PENDING:
            del self._entries[next(iter(self._entries))]

    def returned(self, iteration: int, updates: Sequence[Update]) -> None:
        """Adds to the event of a returned iteration how many new tokens each request got, and which
        requests ended. Sends the event if the timings of all stages have come."""
        entry = self._entries.get(iteration)
        if entry is None:
            return
        n_new: dict[Request, int] = {}
        ended: set[Request] = set()
        for update in updates:
            if update.token_id is not None:
                n_new[update.request] = n_new.get(update.request, 0) + 1
            if update.finish_reason is not None:
                ended.add(update.request)
        requests = [span.request for span in entry.batch.spans]
        event = entry.event
        event.round_trip_ns = self._clock_ns() - entry.sent_ns
        event.n_new_tokens.extend([n_new.get(request, 0) for request in requests])
        event.ended.extend([place for place, one in enumerate(requests) if one in ended])
        entry.is_returned = True
        self._tell_if_complete(iteration, entry)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None:
        """Adds to the event of an iteration the times that a stage spent on the iteration. Sends
        the event if nothing is missing any more."""
        entry = self._entries.get(timing.iteration)
        if entry is not None:
            entry.timings[stage_index] = timing
            self._tell_if_complete(timing.iteration, entry)

    def _tell_if_complete(self, iteration: int, entry: _Entry) -> None:
        if not entry.is_returned or len(entry.timings) < self._n_stages:
            return
        del self._entries[iteration]
        entry.event.stages.extend(self._stages_of(entry))
        self._audience.tell(watch_pb2.WatchEvent(iteration=entry.event))

    def _stages_of(self, entry: _Entry) -> Iterator[watch_pb2.StageTimes]:
        timings = [entry.timings[index] for index in range(self._n_stages)]
        starts = self._starts.starts(
            entry.sent_ns,
            entry.event.round_trip_ns,
            [StageTime(timing.compute_ns, timing.send_ns) for timing in timings],
        )
        for start_ns, timing in zip(starts, timings, strict=True):
            yield watch_pb2.StageTimes(
                start_ns=start_ns,
                receive_ns=timing.receive_ns,
                compute_ns=timing.compute_ns,
                send_ns=timing.send_ns,
            )


def _kind(span: Span, told: ToldRequest) -> watch_pb2.SpanKind:
    if span.start_position >= span.request.n_prefill_tokens:
        return watch_pb2.SPAN_KIND_DECODE
    if span.start_position < told.n_lost:
        return watch_pb2.SPAN_KIND_RECOMPUTATION
    return watch_pb2.SPAN_KIND_PREFILL
