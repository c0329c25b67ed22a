"""A leading scheduler: it forms pipelines out of the workers, and serves each to its end.

gather stages → join an epoch → serve → (lost, or drained) → gather stages → …

Several pipelines may serve at the same time, as many as there are workers for. All take their
requests from one pool, which outlives them. When a pipeline loses a stage, its requests wait in the
pool again, at their old places, and any pipeline may admit them: it runs their tokens again as a
prefill and then generates further tokens. The requests of a pipeline that is late also wait in the
pool again. Such a pipeline goes on as soon as it returns a batch. Frontends stay connected. They
get a message when no pipeline serves, and when one serves again. Stages that were not lost keep
their weights.

A pipeline drains when one of its workers is about to stop: its requests move to other pipelines,
and then it ends. If there is no other pipeline, it serves until workers for the next one are ready.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from services.common import rpc
from services.common.errors import Unavailable
from services.common.process import happens_before
from services.scheduler.building import BuildScheduler, build_order, build_scheduler, describe
from services.scheduler.cluster.stages import WorkerDirectory
from services.scheduler.cluster.term import Term
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.no_control import NO_CONTROL, NoControl
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.epoch import Epoch
from services.scheduler.fleet import Fleet
from services.scheduler.inherited_kv import InheritedKV
from services.scheduler.kept_kv import KeptKV, Written
from services.scheduler.loop_turns import LoopTurns, TurnEvent
from services.scheduler.observing.iteration_observer import IterationObservers, ObserveEpoch
from services.scheduler.observing.iteration_tracer import Traces
from services.scheduler.observing.request_observer import RequestObserver
from services.scheduler.pipeline.adapter_changes import AdapterChanges
from services.scheduler.pipeline.drain import Drain
from services.scheduler.pipeline.engine_master import EngineMaster
from services.scheduler.pipeline.forming import Former, OnMembers
from services.scheduler.pipeline.joining import stored_kv_of
from services.scheduler.pipeline.membership import OnShortfall, Pipeline
from services.scheduler.pipeline.pipeline_lost import PipelineLost
from services.scheduler.pipeline.suspicion import Suspicion
from services.scheduler.scaling.autoscaler import Autoscaler
from services.scheduler.service import SchedulerService
from services.scheduler.serving_loop import ServingLoop
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.watching import Watching

log = logging.getLogger(__name__)

HandOver = Callable[[], Awaitable[None]]
"""A function that gives the lead to another scheduler."""


class Leader:
    """Forms and serves pipelines, until the event that is passed to `lead` is set."""

    def __init__(
        self,
        settings: SchedulerSettings,
        stages: WorkerDirectory,
        service: SchedulerService,
        *,
        requests: RequestObserver,
        control: AdmissionControl | NoControl = NO_CONTROL,
        watching: Watching | None = None,
        observe: Sequence[ObserveEpoch] = (),
        traces: Traces | None = None,
        connect: rpc.Connect = rpc.connect,
        build: BuildScheduler | None = None,
        hand_over: HandOver | None = None,
        on_shortfall: OnShortfall = lambda _: None,
        on_wanted: Callable[[int], None] = lambda _: None,
        on_members: OnMembers = lambda serving, draining: None,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        """`hand_over` is called when this leader begins to stop while a pipeline serves. Without
        it, no request is accepted any more while running requests finish. `on_wanted` is called
        with the number of pipelines that the workers allow. `on_members` is passed to `Former`,
        which describes it. `autoscaler` sets the number of workers while this leader forms
        pipelines."""
        self.has_served = asyncio.Event()
        """Set once the first pipeline serves."""
        self._settings = settings
        self._stages = stages
        self._service = service
        self._requests = requests
        self._observe = observe
        self._watching = watching or Watching(settings)
        self._traces = traces
        self._connect = connect
        self._build = build or build_scheduler
        self._hand_over = hand_over or self._close
        self._on_shortfall = on_shortfall
        self._on_wanted = on_wanted
        self._on_members = on_members
        self._autoscaler = autoscaler
        self._fleet = Fleet(
            RequestPool(
                max_requests=settings.max_requests,
                max_tokens=settings.max_pool_tokens,
                order=build_order(settings, now=self._watching.decisions.clock),
                control=control,
            )
        )
        shared = self._fleet.pool_of(0).shared
        service.adapters.serve(shared.adapters, shared.wake_all)
        self._kept = KeptKV()
        self._inherited = InheritedKV()
        self._serving: dict[asyncio.Task[None], Epoch] = {}  # epochs that join or serve
        self._suspicion = Suspicion()
        self._turns = LoopTurns()
        self._is_draining = False

    async def lead(self, term: Term, stop: asyncio.Event) -> None:
        """Serves until `stop` is set. Then gives running requests at most `drain_s` seconds to
        finish. Ends sooner if another leader takes the stages; frontends then submit the requests
        to that leader.

        Raises:
            Unavailable: there was no pipeline for `start_timeout_s` seconds.
            LeadershipLost: another scheduler leads.
        """
        self._service.lead()
        former = Former(
            self._stages,
            term,
            pipeline_id=self._settings.pipeline_id,
            limit_s=self._settings.start_timeout_s,
            max_pipelines=self._settings.max_pipelines,
            # A model that is asleep needs no pipeline, for as long as it sleeps.
            is_serving=lambda: self._fleet.is_serving or self._is_asleep,
            release=self._release,
            connect=self._connect,
            on_shortfall=self._on_shortfall,
            on_wanted=self._on_wanted,
            on_members=self._on_members,
            on_return=self._suspicion.note_wrong,
        )
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        forming = [self._start(self._form(former), "forming")]
        if self._autoscaler is not None:
            forming.append(self._start(self._autoscaler.run(), "autoscaling"))
        failing = asyncio.create_task(_result_of(self._failure))
        try:
            if await happens_before(failing, stop, cancel=False):
                failing.result()
            self._is_draining = True
            await _cancel(*forming)
            await former.close()
            await self._drain(failing)
        finally:
            await _cancel(*forming, failing, *self._serving)
            await former.close()

    @property
    def _is_asleep(self) -> bool:
        return self._autoscaler is not None and self._autoscaler.is_asleep

    async def _form(self, former: Former) -> None:
        """Forms pipelines, and begins to serve each, until cancelled."""
        while True:
            pipeline = await former.next()
            try:
                epoch = self._assemble(pipeline, former)
            except Unavailable as error:  # it has too little memory
                if not self._fleet.is_serving:
                    raise
                log.error("epoch %d cannot serve: %s", pipeline.epoch, error.message)
                former.note_end(pipeline, PipelineLost(error.message), was_open=False)
                continue
            serving = self._start(self._serve(epoch, former), f"pipeline {pipeline.number}")
            self._serving[serving] = epoch
            serving.add_done_callback(self._serving.pop)

    async def _serve(self, epoch: Epoch, former: Former) -> None:
        """Makes the stages of a pipeline join an epoch, and serves the epoch to its end."""
        loss: PipelineLost | None = None
        written: Written | None = None
        try:
            await epoch.engine.start(wants_kept_blocks=self._may_inherit(epoch.pipeline))
            written = self._resume(epoch)
            self._open(epoch)
            former.note_serving()
            await epoch.loop.run()
        except PipelineLost as error:
            loss = error
        else:
            epoch.scheduler.suspend()  # no request is left; the pipeline admits none any more
        finally:
            epoch.drain.close()
            was_open = epoch.loop in self._fleet.loops
            self._fleet.close(epoch.pipeline.number)
            # While draining, the next leader has most likely taken the stages: nothing is lost.
            is_lost = loss is not None and (self._fleet.is_serving or not self._is_draining)
            epoch.observers.closed(loss.message if loss is not None and is_lost else None)
            if loss is not None and is_lost:
                self._suspend(epoch, loss)
                if written is not None and not loss.is_by_itself:
                    self._keep(epoch, written)
            elif was_open and not (self._fleet.is_serving or self._is_draining):
                self._service.suspend((), ())
            await epoch.engine.close()
        if loss is not None:
            former.note_end(epoch.pipeline, loss, was_open=was_open)
        elif not self._is_draining:
            log.info("epoch %d has drained", epoch.pipeline.epoch)
            former.note_left(epoch.pipeline)

    async def _release(self, pipeline: Pipeline) -> None:
        """Ends a pipeline that drains, because the next pipeline takes over some of its members.
        Waits until the pipeline has ended. The wait is limited, because a pipeline that does not
        return its batches is lost after a time limit. A pipeline that has not opened ends at
        once."""
        for task, epoch in list(self._serving.items()):
            if epoch.pipeline is pipeline:
                if epoch.loop in self._fleet.loops:
                    epoch.loop.leave(is_last=True)
                else:
                    task.cancel()
                await asyncio.wait((task,))

    def _begin_drain(
        self, pipeline: Pipeline, loop: ServingLoop, former: Former, leaving: frozenset[str]
    ) -> None:
        # No request waits for another pipeline if the model goes to sleep.
        loop.leave(is_last=self._is_asleep)
        former.note_leaving(pipeline, leaving)
        self._watching.note_draining(pipeline.epoch)

    def _suspend(self, epoch: Epoch, loss: PipelineLost) -> None:
        """Makes the requests of a lost pipeline wait for any other pipeline. The engine master has
        logged the cause, with addresses that clients must not see."""
        begun, ended = epoch.scheduler.suspend(loss.iteration, is_by_itself=loss.is_by_itself)
        self._service.suspend(begun, ended, is_open=self._fleet.is_serving)

    def _may_inherit(self, pipeline: Pipeline) -> bool:
        """Returns whether a pipeline may go on with the keys and values of an earlier leader.
        Returns False while decisions are recorded, because a replay does not know the tokens of
        these keys and values."""
        return self._inherited.is_wanted(pipeline) and not self._watching.decisions.are_wanted

    def _resume(self, epoch: Epoch) -> Written:
        """Lets an epoch whose stages have joined go on with the keys and values of an ended epoch,
        or of an earlier leader, if the stages still have them. Returns a record of what has been
        written to the memories of the stages."""
        number, answers = epoch.pipeline.epoch, epoch.engine.joined
        kv_manager, stored_kv = epoch.scheduler.kv_manager, stored_kv_of(answers)
        written, earlier = self._kept.begin(number, stored_kv, epoch.scheduler)
        complete = self._inherited.begin(
            epoch.pipeline, stored_kv, answers[0].kept_blocks, kv_manager
        )
        if earlier is not None:
            epoch.scheduler.resume(earlier)
        elif complete is not None:
            written = replace(written, complete=complete)
        if written.memories:
            kv_manager.prefix_cache.record_changes()
        if n_slots := kv_manager.n_unused_slots:
            log.info("epoch %d goes on with %d K/V slots of the one before", number, n_slots)
        return written

    def _keep(self, epoch: Epoch, written: Written) -> None:
        """Remembers the suspended scheduling core of a lost epoch, so that a later epoch can use
        the keys and values that the ranks still hold. Does nothing without a prefix cache, or if a
        rank's memory has no name. Must not be called if a rank failed by itself (by an error or a
        signal), because the failure may have damaged the keys and values."""
        if epoch.scheduler.n_returned:
            complete = (epoch.pipeline.epoch, epoch.scheduler.n_returned)
            written = replace(written, complete=complete)
        self._kept.keep(written, epoch.scheduler)

    def _release_late(
        self, scheduler: Scheduler, observers: IterationObservers, reason: str
    ) -> None:
        """Makes the requests of a late pipeline wait, so that any other pipeline may admit them."""
        moved, ended = scheduler.release_late()
        observers.late(reason, moved)
        self._service.suspend(moved, ended, is_open=True)

    def _assemble(self, pipeline: Pipeline, former: Former) -> Epoch:
        """Creates the objects that serve an epoch, but starts none of them."""
        scheduler = self._build(self._settings, pipeline, self._fleet.pool_of(pipeline.number))
        tracer = None if self._traces is None else self._traces.observe(pipeline, scheduler)
        observers = IterationObservers(
            self._watching.observe(pipeline, scheduler),
            *(observe(pipeline, scheduler) for observe in self._observe),
            *(() if tracer is None else (tracer,)),
        )
        has_news = TurnEvent(self._turns)
        engine = EngineMaster(
            pipeline,
            wake=has_news.set,
            on_timing=observers.timed,
            silence_limit_s=self._settings.silence_limit_s,
            iteration_limit_s=self._settings.iteration_limit_s,
            hang_limit_s=self._settings.hang_limit_s,
            on_leaving=lambda index, leaves_in_s: drain.note(index, leaves_in_s),
            suspicion=self._suspicion,
            may_suspect=partial(self._fleet.may_take_over, pipeline.number),
            on_suspicion=partial(self._release_late, scheduler, observers),
            on_slow_join=self._watching.note_slow_join,
            connect=self._connect,
            trace_of=None if tracer is None else tracer.trace_of,
        )
        loop = ServingLoop(
            scheduler,
            engine,
            deliver=self._service.deliver,
            iterations=observers,
            requests=self._requests,
            has_news=has_news,
            grammars=engine.grammars,
            adapters=AdapterChanges(scheduler.pool, engine.adapters),
        )
        drain = Drain(
            pipeline,
            on_leaving=partial(self._begin_drain, pipeline, loop, former),
            on_last=partial(loop.leave, is_last=True),
        )
        return Epoch(pipeline, scheduler, engine, loop, observers, drain)

    def _open(self, epoch: Epoch) -> None:
        """Reports to observers and frontends that the pipeline serves, and lets it admit the
        requests that are in the pool."""
        pipeline, scheduler = epoch.pipeline, epoch.scheduler
        epoch.observers.opened()
        self._fleet.open(pipeline.number, epoch.loop)
        self._service.open(describe(pipeline, scheduler), self._fleet)
        epoch.loop.adopt()
        n_held, context = scheduler.kv_manager.max_sequence_len, pipeline.first.max_model_len
        if n_held < context and not self.has_served.is_set():
            log.warning(
                "prompt and answer may have %d tokens together, not the %d of the model: K/V "
                "memory (kv_memory, n_slots) holds no more",
                n_held,
                context,
            )
        self.has_served.set()
        log.info(
            "epoch %d: %d stages, %d K/V slots",
            pipeline.epoch,
            pipeline.n_stages,
            scheduler.kv_manager.n_slots,
        )
        if pipeline.n_state_rows is not None:
            log.info(
                "the model keeps a state of each request: %d requests at a time, without prefix "
                "cache and drafts",
                pipeline.n_state_rows,
            )

    async def _drain(self, failing: "asyncio.Task[None]") -> None:
        """Gives running requests at most `drain_s` seconds to finish. Pipelines that do not serve
        yet end at once."""
        joining = [
            task for task, epoch in self._serving.items() if epoch.loop not in self._fleet.loops
        ]
        await _cancel(*joining)
        if not self._fleet.is_serving:
            return
        log.info("draining for at most %g s", self._settings.drain_s)
        self._watching.drain()
        await self._hand_over()
        for loop in self._fleet.loops:
            loop.drain()
        try:
            async with asyncio.timeout(self._settings.drain_s):
                while self._serving and not failing.done():
                    await asyncio.wait(
                        (*self._serving, failing), return_when=asyncio.FIRST_COMPLETED
                    )
        except TimeoutError:
            self._service.resign("the scheduler is stopping")
        if failing.done():
            failing.result()

    async def _close(self) -> None:
        self._service.close()

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Starts a task, and returns it. If the task fails, the leader ends with its error."""
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)


async def _result_of(future: "asyncio.Future[None]") -> None:
    await future


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    """Cancels tasks, and waits until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
