"""Drives a scheduling core on a made-up pipeline, and reports its events to watchers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any

from orcinus.v1 import scheduler_pb2, watch_pb2, worker_pb2

from services.scheduler.building import build_order, build_scheduler
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.clients.accounts import AccountUse
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.epoch_events import EpochTeller
from services.scheduler.watching.watcher import Watcher
from services.scheduler.watching.watching import Watching
from tests.fakes import describe_stage

NOTHING = scheduler_pb2.Submission()


def pipeline_of(
    n_stages: int, *, epoch: int = 1, windows: Sequence[int] = (), number: int = 0
) -> Pipeline:
    """Returns a pipeline of stages without processes. `windows` are the windows of its K/V
    groups."""
    members = [Member(f"stage{i}:1", describe_stage(i, n_stages)) for i in range(n_stages)]
    for member in members:
        member.description.kv_windows.extend(windows)
    return Pipeline("test", epoch, tuple(members), number)


@dataclass
class Play:
    """A pipeline that can be opened, driven and lost again and again. Further pipelines may serve
    at the same time (`beside`)."""

    settings: SchedulerSettings = field(
        default_factory=lambda: SchedulerSettings(n_stages=1, max_batch_size=4)
    )
    windows: Sequence[int] = ()
    first: "Play | None" = None
    number: int = 0

    def __post_init__(self) -> None:
        self.scheduler: Scheduler
        self.epoch: EpochTeller
        self.watching: Watching
        self.pool: RequestPool
        self.epochs: Iterator[int]
        if self.first is not None:
            self.watching = self.first.watching
            self.pool = self.first.pool.beside()
            self.epochs = self.first.epochs
            return
        self.watching = Watching(self.settings)
        self.pool = RequestPool(
            max_requests=self.settings.max_requests,
            order=build_order(self.settings, now=self.watching.decisions.clock),
        )
        self.epochs = count(1)

    def beside(self, number: int) -> "Play":
        """Returns a further pipeline with the number `number`, which takes its requests from the
        same pool."""
        return Play(self.settings, self.windows, first=self, number=number)

    def open(self, *, goes_on: bool = False) -> None:
        """Forms a new pipeline and opens it. If `goes_on`, the new pipeline keeps the keys and
        values of the pipeline before, if it can."""
        earlier = self.scheduler if goes_on else None
        self.form()
        if earlier is not None and self.scheduler.kv_manager.can_take_over(earlier.kv_manager):
            self.scheduler.resume(earlier)
        self.epoch.opened()
        self.note(self.scheduler.adopt())

    def form(self) -> None:
        """Forms a new pipeline, which does not serve yet."""
        pipeline = pipeline_of(
            self.settings.n_stages or 1,
            epoch=next(self.epochs),
            windows=self.windows,
            number=self.number,
        )
        self.scheduler = build_scheduler(self.settings, pipeline, self.pool)
        self.epoch = self.watching.observe(pipeline, self.scheduler)

    def be_late(self) -> None:
        """Marks the pipeline as late, so that its requests may move to other pipelines."""
        moved, ends = self.scheduler.release_late()
        self.epoch.late("iteration 1 has not returned in 0.5 s", moved)
        for request in moved:
            self.watching.requests.suspended(request)
        self.note(ends)

    def lose(self, why: str = "stage 0 is gone: 10.0.0.1:50051 refused") -> None:
        """Loses the pipeline, so that its requests wait again."""
        self.epoch.closed(why)
        begun, ends = self.scheduler.suspend()
        for request in begun:
            self.watching.requests.suspended(request)
        self.note(ends)

    def leave(self) -> None:
        """Ends the pipeline on purpose. It must have no requests."""
        self.epoch.closed(None)
        self.scheduler.suspend()

    def submit(
        self,
        name: str,
        *,
        prompt: Sequence[int] = (1, 2, 3),
        max_new_tokens: int = 4,
        account: AccountUse | None = None,
        priority: int = 0,
        **fields: Any,
    ) -> Request:
        """Puts a new request into the pool, and returns the request."""
        request = Request(
            RequestId(name),
            prompt,
            max_new_tokens,
            account=account,
            priority=priority,
            **{"speculation": Speculation(), **fields},
        )
        self.scheduler.submit(request)
        self.watching.requests.submitted(request, NOTHING)
        return request

    def send(self) -> Batch:
        """Sends the next batch and returns it. There must be one."""
        batch = self.try_to_send()
        assert batch is not None
        return batch

    def try_to_send(self) -> Batch | None:
        """Sends the next batch and returns it. Returns None if there is none."""
        batch = self.scheduler.select()
        if batch is None:
            return None
        for request in self.scheduler.take_preempted():
            self.watching.requests.preempted(request)
        for span in batch.spans:
            if span.is_admission:
                self.watching.requests.admitted(span.request)
        self.epoch.sent(batch, self.scheduler)
        return batch

    def give_back(self, batch: Batch, *token_ids: int) -> None:
        """Returns the results of a batch to the scheduler. The sampled tokens are `token_ids`,
        repeated as often as needed."""
        n_sampled = sum(span.is_sampled for span in batch.spans) + batch.n_drafts
        tokens = islice(cycle(token_ids or (5,)), n_sampled)
        updates = self.scheduler.apply(batch.iteration, list(tokens))
        self.note(updates)
        self.epoch.returned(batch.iteration, updates, self.scheduler)

    def time(self, batch: Batch, stage_index: int = 0, compute_ns: int = 77) -> None:
        """Reports the compute time of a batch on a stage."""
        timing = worker_pb2.IterationTiming(iteration=batch.iteration, compute_ns=compute_ns)
        self.epoch.timed(stage_index, timing)

    def run(self, n_iterations: int = 1) -> None:
        """Runs iterations: sends a batch, returns its results, and reports the times of all
        stages."""
        for _ in range(n_iterations):
            batch = self.send()
            self.give_back(batch)
            for stage_index in range(self.settings.n_stages or 1):
                self.time(batch, stage_index)

    def note(self, updates: Sequence[Update]) -> None:
        """Tells watchers about the requests that have ended."""
        for update in updates:
            if update.finish_reason is not None:
                self.watching.requests.ended(update.request, update.finish_reason)


async def told(watcher: Watcher) -> list[watch_pb2.WatchEvent]:
    """Returns all events that wait for a watcher."""
    return list((await watcher.next_message()).events)


def kinds(events: Sequence[watch_pb2.WatchEvent]) -> list[str]:
    """Returns the types of the events."""
    return [event.WhichOneof("event") or "" for event in events]
