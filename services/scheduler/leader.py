"""The life of a leading scheduler: it forms a pipeline, serves it to its end, and forms the next.

gather stages → join an epoch → serve → (lost) → gather stages → …

When a pipeline loses a stage, its requests wait in the pool, which outlives the epochs. The next
pipeline runs the tokens of these requests again as a prefill and then generates further tokens.
Frontends stay connected and are told when the next pipeline serves. Stages that were not lost keep
their weights.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from orcinus.v1 import scheduler_pb2

from services.common import rpc
from services.common.errors import Unavailable
from services.common.process import happens_before
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.cluster.term import Term
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.no_control import NO_CONTROL, NoControl
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.order import Order, OrderOptions
from services.scheduler.core.order.registry import ORDERS
from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.policies.registry import POLICIES
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.iteration_observer import IterationObservers, ObserveEpoch
from services.scheduler.observing.iteration_tracer import Traces
from services.scheduler.observing.request_observer import RequestObserver
from services.scheduler.pipeline.engine_master import EngineMaster
from services.scheduler.pipeline.membership import LastPipeline, OnShortfall, Pipeline, gather
from services.scheduler.pipeline.pipeline_lost import PipelineLost
from services.scheduler.service import SchedulerService
from services.scheduler.serving_loop import ServingLoop
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.watching import Watching

log = logging.getLogger(__name__)

BuildScheduler = Callable[[SchedulerSettings, Pipeline, RequestPool], Scheduler]
"""A function that makes the scheduling core for a pipeline and for a pool, which may have requests
of earlier pipelines."""

HandOver = Callable[[], Awaitable[None]]
"""A function that lets another scheduler lead from now on."""

PAUSE_S = 0.2
MAX_PAUSE_S = 5.0


class FormingTimeout:
    """The time that is left to form a pipeline, and the pause between two attempts.

    Stages may answer and still fail to join. The pauses keep this process from trying all the time,
    and the limit lets it give up.
    """

    def __init__(self, limit_s: float) -> None:
        self.pause_s = PAUSE_S
        self._limit_s = limit_s
        self._clock = asyncio.get_running_loop().time
        self._since = self._clock()
        self._trouble = ""

    def left_s(self) -> float:
        """Returns the seconds that are left to form a pipeline.

        Raises:
            Unavailable: the time is over.
        """
        left_s = self._since + self._limit_s - self._clock()
        if left_s <= 0:
            raise Unavailable(f"no pipeline within {self._limit_s:g} s: {self._trouble}")
        return left_s

    def note_loss(self, loss: PipelineLost, *, was_open: bool) -> None:
        """Notes that a pipeline was lost. If it was open, the time starts anew. If it never opened,
        the next pause is longer."""
        self._trouble = loss.message
        if was_open:
            self.pause_s, self._since = PAUSE_S, self._clock()
        else:
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)


class Leader:
    """Runs one pipeline after the other, until told to stop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        stages: StageDirectory,
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
    ) -> None:
        """`hand_over` is called when this leader is told to stop, if there is another scheduler.
        Otherwise no request is accepted any more while running requests finish."""
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
        self._pool = RequestPool(
            max_requests=settings.max_requests,
            max_tokens=settings.max_pool_tokens,
            order=build_order(settings, now=self._watching.decisions.clock),
            control=control,
        )

    async def lead(self, term: Term, stop: asyncio.Event) -> None:
        """Serves until `stop` is set. Then gives running requests `drain_s` to finish, and ends
        sooner if another leader takes the stages: frontends submit the requests to that one.

        Raises:
            Unavailable: there was no pipeline for too long.
            LeadershipLost: another scheduler leads.
        """
        self._service.lead()
        timeout = FormingTimeout(self._settings.start_timeout_s)
        last = LastPipeline()
        while not stop.is_set():
            gathering = asyncio.create_task(
                gather(
                    self._stages,
                    term=term,
                    pipeline_id=self._settings.pipeline_id,
                    timeout_s=timeout.left_s(),
                    connect=self._connect,
                    last=last,
                    on_shortfall=self._on_shortfall,
                )
            )
            if not await happens_before(gathering, stop):
                return
            epoch = self._assemble(gathering.result())
            try:
                await self._serve(epoch, stop)
            except PipelineLost as loss:
                # The engine master has logged the cause, with addresses that clients must not see.
                timeout.note_loss(loss, was_open=self._service.is_open)
                last = LastPipeline(epoch.pipeline.members, loss.gone)
                suspended = epoch.scheduler.suspend(loss.iteration, is_by_itself=loss.is_by_itself)
                self._service.suspend(*suspended)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), timeout.pause_s)

    async def _serve(self, epoch: "_Epoch", stop: asyncio.Event) -> None:
        """Forms one epoch and serves it to its end."""
        loss: str | None = None
        try:
            starting = asyncio.create_task(epoch.engine.start())
            if not await happens_before(starting, stop):
                return
            starting.result()
            self._open(epoch)
            await self._run_to_the_end(epoch.loop, stop)
        except PipelineLost as error:
            if stop.is_set():  # most likely the next leader has the stages, so nothing is lost
                return
            loss = error.message
            raise
        finally:
            epoch.observers.closed(loss)
            await epoch.engine.close()

    def _assemble(self, pipeline: Pipeline) -> "_Epoch":
        """Creates the parts that serve an epoch. Nothing is started yet."""
        scheduler = self._build(self._settings, pipeline, self._pool)
        tracer = None if self._traces is None else self._traces.observe(pipeline, scheduler)
        observers = IterationObservers(
            self._watching.observe(pipeline, scheduler),
            *(observe(pipeline, scheduler) for observe in self._observe),
            *(() if tracer is None else (tracer,)),
        )
        has_news = asyncio.Event()
        engine = EngineMaster(
            pipeline,
            wake=has_news.set,
            on_timing=observers.timed,
            silence_limit_s=self._settings.silence_limit_s,
            iteration_limit_s=self._settings.iteration_limit_s,
            hang_limit_s=self._settings.hang_limit_s,
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
        )
        return _Epoch(pipeline, scheduler, engine, loop, observers)

    def _open(self, epoch: "_Epoch") -> None:
        """Tells observers and frontends that requests may come, and takes over the requests in the
        pool."""
        pipeline, scheduler = epoch.pipeline, epoch.scheduler
        epoch.observers.opened()
        self._service.open(describe(pipeline, scheduler), epoch.loop)
        epoch.loop.adopt()
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

    async def _run_to_the_end(self, loop: ServingLoop, stop: asyncio.Event) -> None:
        """Runs the loop. When told to stop, gives running requests some time to finish."""
        serving = asyncio.create_task(loop.run(), name="serving loop")
        try:
            if not await happens_before(serving, stop, cancel=False):
                log.info("draining for at most %g s", self._settings.drain_s)
                self._watching.drain()
                await self._hand_over()
                loop.drain()
                await asyncio.wait_for(serving, self._settings.drain_s)
            serving.result()
        except TimeoutError:
            self._service.resign("the scheduler is stopping")
        finally:
            serving.cancel()

    async def _close(self) -> None:
        self._service.close()


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The parts that serve one epoch."""

    pipeline: Pipeline
    scheduler: Scheduler
    engine: EngineMaster
    loop: ServingLoop
    observers: IterationObservers


def build_scheduler(
    settings: SchedulerSettings,
    pipeline: Pipeline,
    pool: RequestPool,
) -> Scheduler:
    """Returns a scheduling core with the K/V memory, the policy and the depth for a pipeline.

    Raises:
        Unavailable: there is no memory for a single block.
    """
    has_one_stage = pipeline.n_stages == 1
    depth = settings.pipeline_depth or default_depth(pipeline.n_stages)
    policy = build_policy(settings, n_shares=1 if has_one_stage else depth)
    drafter = build_drafter(settings, pipeline)
    return Scheduler(
        pool,
        build_kv_manager(settings, pipeline, policy, drafter),
        policy=policy,
        pipeline_depth=depth,
        token_hand_off=has_one_stage,
        drafter=drafter,
    )


def default_depth(n_stages: int) -> int:
    """Returns the largest number of batches in flight if the settings do not give one.

    With one stage there are two: the second batch has the requests of the first, whose tokens stay
    on the rank, so it costs nothing. With several stages there is one batch for each stage. One
    batch more would hide the time that results and plans need to travel, but would divide the
    requests among more and smaller batches.
    """
    return max(2, n_stages)


def build_kv_manager(
    settings: SchedulerSettings, pipeline: Pipeline, policy: Policy, drafter: Drafter | None = None
) -> KVManager:
    """Returns the manager of a pipeline's K/V memory, for the longest spans and drafts that the
    policy and the drafter make.

    Raises:
        Unavailable: there is no memory for one block in each K/V group.
    """
    block_size, n_groups = pipeline.first.block_size, len(pipeline.kv_windows)
    n_blocks = pipeline.n_kv_blocks
    if settings.n_slots is not None:
        n_blocks = min(n_blocks, settings.n_slots // block_size * n_groups)
    if n_blocks == 0:
        raise Unavailable(f"n_slots: {settings.n_slots} is less than a block of {block_size} slots")
    if n_blocks < n_groups:
        raise Unavailable(
            f"the stages have memory for {n_blocks} K/V blocks, and a request has {n_groups} at "
            "least, one in each K/V group"
        )
    return KVManager(
        n_blocks=n_blocks,
        block_size=block_size,
        groups=BlockGroups(
            pipeline.kv_windows,
            policy.max_span_tokens,
            max_drafts=0 if drafter is None else drafter.max_drafts,
        ),
        # The state of a request is kept in no block: a request that began with cached blocks of
        # another request would lack the state.
        has_prefix_cache=settings.prefix_cache and pipeline.n_state_rows is None,
        max_rows=pipeline.n_state_rows,
        expected_use=ExpectedUse() if settings.admission == "optimistic" else None,
    )


def build_drafter(settings: SchedulerSettings, pipeline: Pipeline) -> Drafter | None:
    """Returns the drafter, or None if no tokens are drafted.

    There are no drafts with Algorithm 1, which does not know them. There are none for a model that
    keeps a state of each request, since a state cannot undo a refused draft. There are none where
    stages record decodes (CUDA graphs): spans of several tokens are not recorded, so drafts would
    not make an iteration faster.
    """
    if not (POLICIES[settings.policy].takes_drafts and settings.speculative_tokens):
        return None
    if pipeline.n_state_rows is not None:
        return None
    if any(member.description.records_decodes for member in pipeline.members):
        return None
    limits = (settings.speculative_batch_tokens, settings.max_batch_tokens)
    return Drafter(
        max_drafts=settings.speculative_tokens,
        max_batch_tokens=min(filter(None, (*limits, settings.fair_batch_tokens))),
    )


def build_order(settings: SchedulerSettings, *, now: Callable[[], float] = time.monotonic) -> Order:
    """Returns the order of requests that the settings name. The order has no requests yet. `now` is
    its clock."""
    return ORDERS[settings.order].of(
        OrderOptions(settings.ageing_s, settings.fair_batch_tokens), now
    )


def build_policy(settings: SchedulerSettings, *, n_shares: int) -> Policy:
    """Returns the policy that the settings name. `n_shares` is the number of batches in flight
    among which the policy divides the requests."""
    return POLICIES[settings.policy].of(
        PolicyOptions(settings.max_batch_size, settings.max_batch_tokens, n_shares)
    )


def describe(pipeline: Pipeline, scheduler: Scheduler) -> scheduler_pb2.PipelineDescription:
    """Returns the description of the pipeline for frontends."""
    first = pipeline.first
    return scheduler_pb2.PipelineDescription(
        model=first.model,
        vocab_size=first.vocab_size,
        max_model_len=min(
            first.max_model_len, scheduler.kv_manager.max_sequence_len, scheduler.pool.max_tokens
        ),
        eos_token_ids=first.eos_token_ids,
        can_follow_grammars=pipeline.members[-1].description.can_follow_grammars,
        n_stages=pipeline.n_stages,
        tp_size=first.tp_size,
    )
