"""Forms pipelines out of the workers that are in no pipeline, as long as there are enough workers.

One `Former` belongs to a leader. It keeps asking the free workers, assigns stages to them, and
yields a pipeline whenever each stage has a ready worker. The leader notifies it when a pipeline
ends, and then the members of that pipeline are free again. While a pipeline drains, another one is
formed in its place, if there are enough workers.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence

from services.common import rpc
from services.common.errors import Unavailable
from services.scheduler.cluster.stages import WorkerDirectory
from services.scheduler.cluster.term import Term
from services.scheduler.pipeline.free_workers import FreeWorkers
from services.scheduler.pipeline.joining import JOIN_TIMEOUT_S
from services.scheduler.pipeline.membership import (
    LastPipeline,
    Member,
    OnShortfall,
    Pipeline,
    RollCall,
)
from services.scheduler.pipeline.pipeline_lost import PipelineLost

PAUSE_S = 0.2
"""Shortest pause in seconds between the loss of a pipeline that never served and the next attempt.
The pause doubles with each further loss of this kind."""

MAX_PAUSE_S = 5.0
"""Longest pause in seconds between two attempts that fail."""

OnMembers = Callable[[Sequence[Pipeline], Sequence[Pipeline]], None]
"""A function that is called with two lists: all pipelines that have been formed and have not ended,
and those pipelines of the first list that drain."""

LOOK_S = 0.2
"""Seconds between two checks of the number of free workers and of the remaining time."""


class FormingTimeout:
    """Limits the time to form a pipeline, and tells the pause between two attempts.

    Stages may answer and still fail to join. The pauses limit the number of attempts, and after the
    time limit the scheduler's process gives up.
    """

    def __init__(self, limit_s: float) -> None:
        self.pause_s = PAUSE_S
        self._limit_s = limit_s
        self._clock = asyncio.get_running_loop().time
        self._since = self._clock()
        self._trouble = ""

    def check(self, trouble: str, *, grace_s: float) -> None:
        """Checks that time is left to form a pipeline. `trouble` is the latest reason why there is
        no pipeline, and `grace_s` is added to the time limit.

        Raises:
            Unavailable: the time is over.
        """
        if self._clock() - self._since >= self._limit_s + grace_s:
            troubles = "; ".join(filter(None, (self._trouble, trouble)))
            raise Unavailable(
                f"no pipeline within {self._limit_s:g} s: {troubles or 'no worker has answered'}"
            )

    def begin_anew(self) -> None:
        """Restarts the time limit for forming a pipeline. Called while a pipeline serves."""
        self._since, self._trouble = self._clock(), ""

    def note_loss(self, loss: PipelineLost, *, was_open: bool) -> None:
        """Notes that a pipeline was lost. If it has served (`was_open`), the time limit restarts,
        and there is no pause. If it never served, the next pause is longer."""
        self._trouble = loss.message
        if was_open:
            self.pause_s, self._since = 0.0, self._clock()
        else:
            self.pause_s = min(max(2 * self.pause_s, PAUSE_S), MAX_PAUSE_S)


class Former:
    """Forms one pipeline after another, in addition to the pipelines that serve already."""

    def __init__(
        self,
        stages: WorkerDirectory,
        term: Term,
        *,
        pipeline_id: str,
        limit_s: float,
        max_pipelines: int | None = None,
        is_serving: Callable[[], bool],
        release: Callable[[Pipeline], Awaitable[None]],
        connect: rpc.Connect = rpc.connect,
        on_shortfall: OnShortfall = lambda _: None,
        on_wanted: Callable[[int], None] = lambda _: None,
        on_members: OnMembers = lambda serving, draining: None,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        """`limit_s` limits the time without any serving pipeline, and `is_serving` returns whether
        a pipeline serves. `release` ends a pipeline that drains, when another pipeline takes over
        some of its members. `max_pipelines` limits the number of pipelines. `on_wanted` is called
        with the number of pipelines that the known workers and this limit allow. `on_members` is
        called when pipelines form, begin to drain or end. `AskedWorker` describes `on_return`."""
        self._free = FreeWorkers(stages)
        self._term = term
        self._pipeline_id = pipeline_id
        self._max_pipelines = max_pipelines
        self._is_serving = is_serving
        self._release = release
        self._on_wanted = on_wanted
        self._on_members = on_members
        self._timeout = FormingTimeout(limit_s)
        self._call = RollCall(
            self._free,
            term,
            connect,
            on_shortfall=on_shortfall,
            n_pipelines=lambda: max(1, self._n_wanted() - self._free.n_staying),
            serving=self._free.traits,
            is_serving=self._free.is_serving,
            taken=self._free.processes,
            may_use_leaving=self._free.may_use_leaving,
            is_terminating=self._free.is_terminating,
            on_return=on_return,
        )
        self._pause_until = 0.0
        self._has_ended = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    async def next(self) -> Pipeline:
        """Waits until there are enough free workers for another pipeline, and returns it. Its
        members are not free until `note_end` or `note_left` is called.

        Raises:
            Unavailable: no pipeline has served for `limit_s`. The error says what was missing.
            LeadershipLost: another scheduler leads.
        """
        members: list[Member] | None = None
        while members is None:
            while (pause_s := self._pause_s()) > 0 or not self._may_form():
                self._check_time()
                if pause_s <= 0 and self._is_serving():
                    await self._call.recall_surplus()
                await self._look(min(pause_s, LOOK_S) if pause_s > 0 else LOOK_S)
            members = await self._complete()
        for drained in self._free.replaced_by(members):
            await self._release(drained)
            self._free.give_back(drained)
        epoch = await self._term.next_epoch(self._call.newest_epoch)
        number = self._free.next_number()
        pipeline = Pipeline(self._pipeline_id, epoch, tuple(members), number)
        self._free.take(pipeline)
        self._tell_members()
        await self._call.refresh()
        return pipeline

    async def _look(self, timeout_s: float) -> None:
        """Waits until a pipeline ends, but at most `timeout_s` seconds."""
        self._has_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()

    async def _complete(self) -> list[Member] | None:
        """Waits until the free workers make a pipeline, and returns its members. Returns None if
        another pipeline is lost meanwhile, so that forming has to pause."""
        completing = asyncio.create_task(self._call.until_complete())
        try:
            while not completing.done():
                self._check_time()
                self._on_wanted(self._n_wanted())
                await asyncio.wait((completing,), timeout=LOOK_S)
                if self._pause_s() > 0:
                    return None
        finally:
            completing.cancel()
            await asyncio.wait((completing,))
        return completing.result()

    def _pause_s(self) -> float:
        """Returns the seconds until a pipeline may be formed again after a loss."""
        return self._pause_until - self._clock()

    def note_end(self, pipeline: Pipeline, loss: PipelineLost, *, was_open: bool) -> None:
        """Notes that a pipeline is lost. Its members may form another one."""
        self._timeout.note_loss(loss, was_open=was_open)
        self._pause_until = self._clock() + self._timeout.pause_s
        self._call.note_lost(LastPipeline(pipeline.members, loss.gone))
        self._free.give_back(pipeline)
        self._tell_members()
        self._has_ended.set()

    def note_serving(self) -> None:
        """Notes that a pipeline serves. From now on, workers that are leaving form no pipeline."""
        self._free.note_serving()

    def note_leaving(self, pipeline: Pipeline, leaving: Collection[str]) -> None:
        """Notes that a pipeline drains because its workers at the addresses `leaving` are about to
        end."""
        self._free.drain(pipeline, leaving)
        self._tell_members()

    def note_left(self, pipeline: Pipeline) -> None:
        """Notes that a pipeline has ended without being lost, and makes its members free. Members
        that are not leaving may form another pipeline at once."""
        self._free.give_back(pipeline)
        self._tell_members()
        self._has_ended.set()

    async def close(self) -> None:
        """Stops asking the workers for their descriptions."""
        await self._call.close()

    def _tell_members(self) -> None:
        self._on_members(self._free.pipelines, self._free.draining)

    def _may_form(self) -> bool:
        """Returns whether another pipeline should be formed. Returns True, however few workers
        there are, if there is no pipeline or all pipelines drain: the attempt tells operators which
        workers are missing."""
        n_wanted = self._n_wanted()
        self._on_wanted(n_wanted)
        return self._free.n_staying < n_wanted

    def _n_wanted(self) -> int:
        """Returns the number of pipelines that the known workers and `max_pipelines` allow, but at
        least 1."""
        n_more = self._free.n_free // self._free.n_stages
        n_pipelines = max(1, self._free.n_staying + n_more)
        return n_pipelines if self._max_pipelines is None else min(n_pipelines, self._max_pipelines)

    def _check_time(self) -> None:
        if self._is_serving():
            self._timeout.begin_anew()
        else:
            is_joining = self._free.are_taken
            self._timeout.check(self._call.trouble, grace_s=2 * JOIN_TIMEOUT_S * is_joining)
