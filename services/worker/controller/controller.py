"""The controller of one stage (Orca, section 4.1): its parts, and the dispatch of messages.

    assignment      the stage that this worker is
    epoch           the current epoch, and the joining of the ranks
    plans           forwards plans to the ranks and to the next stage
    reports         sends the reports of ranks to the scheduler that watches the stage
    departure       whether the worker must stop, and the time until it ends
    rank_watch      heartbeats, and the loss of a rank
    traits          what must be equal on all stages of a pipeline
    loading         progress of the weights, and the description of the loaded stage
    profile_orders  profiles that people order
    grammar_orders  grammars that the ranks compile

The controller never decodes a plan and never waits for a rank to compute.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from uuid import uuid4

from orcinus.v1 import worker_pb2

from services.common import rpc
from services.common.errors import InvalidRequest, Unavailable
from services.common.protocol import PROTOCOL
from services.worker.channel import MessageKind
from services.worker.controller.assignment import Assignment
from services.worker.controller.departure import LINGER_S, Departure
from services.worker.controller.epoch import Epoch
from services.worker.controller.grammar_orders import GrammarOrders
from services.worker.controller.loading import Loading, OnCheckpoint, OnProgress
from services.worker.controller.plan_relay import PlanRelay
from services.worker.controller.profile_orders import ProfileOrders
from services.worker.controller.rank_process import RankLink
from services.worker.controller.rank_traits import RankTraits
from services.worker.controller.rank_watch import RankWatch
from services.worker.controller.report_feed import ReportFeed
from services.worker.controller.stage_tracer import StageTracer
from services.worker.settings import PipelinePlace

FROM_OUTSIDE = {0, -signal.SIGKILL, -signal.SIGTERM}
"""Exit statuses of a rank that did not fail by itself: the rank was stopped by its controller, or
killed by an operator, or killed by the kernel because the machine ran out of memory."""

MAX_NAME_LENGTH = 300
"""Largest number of characters in an address or in the name of a pipeline. A DNS name has at most
253 characters."""


class Controller:
    """Controls one stage. The stage is in at most one epoch at a time."""

    def __init__(
        self,
        *,
        tp_size: int,
        place: PipelinePlace | None = None,
        connect: rpc.Connect = rpc.connect,
        profile_orders: ProfileOrders | None = None,
        on_progress: OnProgress | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        on_started: Callable[[], None] = lambda: None,
        plan_relay: type[PlanRelay] = PlanRelay,
    ) -> None:
        """If `place` is None, the worker has no stage until a leader assigns one. `on_progress` is
        called while the ranks load, and `on_checkpoint` with the report about the checkpoint.
        `on_started` is called when all ranks have reported equal traits, and can load a stage.
        Benchmarks pass another class as `plan_relay`."""
        self.name = ""
        """Name of the worker in logs and messages."""
        self._process = uuid4().hex
        self.assignment = Assignment(place)
        self.epoch = Epoch()
        self.reports = ReportFeed(self.epoch)
        self.plans = plan_relay(
            self.epoch, connect=connect, on_next_lost=self.reports.publish_neighbours_loss
        )
        self.departure = Departure()
        self.rank_watch = RankWatch(tp_size, on_alive=self._on_alive, on_lost=self._on_lost)
        self.traits = RankTraits(
            tp_size, on_difference=self.rank_watch.lose, on_complete=on_started
        )
        self.loading = Loading(tp_size, on_progress=on_progress, on_checkpoint=on_checkpoint)
        self.profile_orders = profile_orders or ProfileOrders(None)
        self.grammar_orders = GrammarOrders(self.epoch)
        self._tracer: StageTracer | None = None
        self._is_ending = False

    def attach(self, ranks: Sequence[RankLink], *, tracer: StageTracer | None = None) -> None:
        """Sets the ranks of the stage, in the order of their tp_rank, and the tracer that makes the
        trace spans of traced iterations."""
        self._tracer = tracer
        self.epoch.attach(ranks)
        self.plans.attach(ranks, tracer=tracer)
        self.grammar_orders.attach(ranks)
        place = self.assignment.place
        self.profile_orders.attach(ranks, stage_index=place.stage_index if place else 0)

    def describe(self) -> worker_pb2.DescribeResponse:
        """Returns the description of the worker.

        Raises:
            Unavailable: the process is about to end.
        """
        self._refuse_if_ending()
        place = self.assignment.place
        description = self.loading.describe()
        if description is not None:
            description.state = worker_pb2.WORKER_STATE_READY
        elif place is not None:
            description = worker_pb2.DescribeResponse(
                state=worker_pb2.WORKER_STATE_LOADING,
                stage_index=place.stage_index,
                n_stages=place.n_stages,
            )
        else:
            description = worker_pb2.DescribeResponse(state=worker_pb2.WORKER_STATE_FREE)
        description.is_fixed = self.assignment.is_fixed
        description.epoch = self.epoch.number
        description.protocol = PROTOCOL
        description.name = self.name
        description.process = self._process
        description.traits.update(self.traits.all)
        description.is_leaving = self.departure.has_begun
        return description

    def assign(self, request: worker_pb2.AssignStageRequest) -> None:
        """Makes the worker the stage that the request names.

        Raises:
            StaleEpoch: the epoch is not newer than the newest epoch that the worker has seen.
            InvalidRequest: the worker's settings name another stage, or the stage cannot exist.
            Unavailable: the process is about to end, perhaps because it has seen an epoch too large
                for any leader.
        """
        self._refuse_if_ending()
        place = PipelinePlace(request.stage_index, request.n_stages)
        self.assignment.check(place)
        self._forget_unreached(request.epoch)
        self.epoch.claim(request.epoch)
        self.assignment.take(place)

    async def join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Makes the stage leave its epoch and join the newer epoch of the request.

        Raises:
            StaleEpoch: the epoch is not newer than the newest epoch that the worker has seen.
            InvalidRequest: the request is for another stage, or a size in it is too large.
            Unavailable: the process is about to end, a rank has not loaded, or the ranks did not
                find the ranks of the other stages.
        """
        self._refuse_if_ending()
        own = self.loading.describe()
        if own is None:
            raise Unavailable("this worker has not loaded a stage")
        check_place(request, own)
        self._forget_unreached(request.epoch)
        self.epoch.advance(request)
        with self.reports.expecting():
            await self.close()
            self.epoch.check(request.epoch)  # a newer epoch may have been claimed during the wait,
            self._refuse_if_ending()  # and a rank may have been lost
            if self._tracer is not None:
                self._tracer.joined(request.epoch)
            await self.epoch.join_ranks(request)
        self.plans.open(request)

    async def leave(self, limit_s: float, *, linger_s: float = LINGER_S) -> None:
        """Reports to the leader that this worker must stop. Returns when nothing has watched the
        stage for `linger_s` seconds, which means that the leader has released the stage and no
        other leader has taken it. Returns after `limit_s` seconds at the latest, and at once if the
        stage is in no pipeline."""
        self.departure.begin(limit_s)
        self._on_alive()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.reports.until_unwatched(for_s=linger_s)

    async def end(self) -> None:
        """Refuses all calls from now on and ends all streams, because the process is about to end.
        The engine master thus learns of the end at once, and no leader assigns a stage to this
        worker."""
        self._is_ending = True
        await self.close()

    async def close(self) -> None:
        """Ends all streams of the current epoch, and its orders to compile grammars."""
        self.reports.end()
        self.grammar_orders.end()
        await self.plans.close()

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """Passes a message from a rank to the part of the controller that handles messages of this
        kind."""
        match kind:
            case MessageKind.REPORT:
                self.reports.publish(payload)
            case MessageKind.HEARTBEAT:
                self.rank_watch.note_heartbeat(tp_rank)
            case MessageKind.JOINED:
                self.epoch.note_joined(tp_rank, payload)
            case MessageKind.NOT_JOINED:
                self.epoch.note_not_joined(tp_rank, payload)
            case MessageKind.TRAITS | MessageKind.PROGRESS | MessageKind.LOADED:
                self._note_loading(tp_rank, kind, payload)
            case MessageKind.CHECKPOINT:
                self.loading.note_checkpoint(payload)
            case MessageKind.FAILURE | MessageKind.REFUSAL:
                self._lose(tp_rank, kind, payload.decode())
            case MessageKind.PROFILED | MessageKind.NOT_PROFILED | MessageKind.GRAMMAR_PREPARED:
                self._on_answer(tp_rank, kind, payload)
            case MessageKind.TRACE if self._tracer is not None:
                self._tracer.record(payload)

    def on_exit(self, tp_rank: int, status: int) -> None:
        """Declares the stage failed because the process of a rank has ended."""
        self.rank_watch.lose(
            f"rank {tp_rank} exited with status {status}", is_by_itself=status not in FROM_OUTSIDE
        )

    def _note_loading(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        if kind is MessageKind.TRAITS:
            self.traits.note(tp_rank, payload)
        elif kind is MessageKind.PROGRESS:
            self.loading.note_progress(tp_rank, payload)
        else:
            self.loading.note_loaded(tp_rank, payload)
            self.rank_watch.note_loaded(tp_rank)

    def _lose(self, tp_rank: int, kind: MessageKind, reason: str) -> None:
        # A refusal is due to the settings, so the rank that reports it first is irrelevant.
        whose = "" if kind is MessageKind.REFUSAL else f"rank {tp_rank}: "
        self.rank_watch.lose(whose + reason, is_by_itself=kind is MessageKind.FAILURE)

    def _on_answer(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """Passes a rank's answer to the part of the controller that is waiting for it."""
        if kind is MessageKind.GRAMMAR_PREPARED:
            self.grammar_orders.note_answer(tp_rank, payload)
        else:
            self.profile_orders.on_message(kind, payload)

    def _forget_unreached(self, number: int) -> None:
        """Recalls the worker and raises Unavailable if the worker has seen an epoch so large that
        no leader can exceed it. Does nothing if `number`, the epoch of the leader's request, is
        larger."""
        if number <= self.epoch.number and self.epoch.is_out_of_reach:
            why = f"no leader can have reached epoch {self.epoch.number}, nor go beyond it"
            self.assignment.recall(why)
            raise Unavailable(f"this worker starts again: {why}")

    def _refuse_if_ending(self) -> None:
        if self.rank_watch.failure.done():
            raise Unavailable(self.rank_watch.failure.result())
        if self._is_ending:
            raise Unavailable("this worker is about to end")

    def _on_alive(self) -> None:
        self.reports.publish_heartbeat(leaves_in_ms=self.departure.left_ms)

    def _on_lost(self, reason: str, is_by_itself: bool) -> None:
        self.epoch.give_up(reason)
        self.reports.publish_failure(reason, is_by_itself=is_by_itself)


def check_place(request: worker_pb2.JoinPipelineRequest, own: worker_pb2.DescribeResponse) -> None:
    """Raises InvalidRequest if a request to join an epoch does not fit the stage described by
    `own`.

    The sizes in the request are checked too, because ranks allocate memory for them.

    Raises:
        InvalidRequest: the request is for another stage, or a size in it is too large.
    """
    for field in ("stage_index", "tp_size"):
        if getattr(request, field) != getattr(own, field):
            raise InvalidRequest(field, f"must be {getattr(own, field)} on this stage")
    if len(request.members) != own.n_stages:
        raise InvalidRequest("members", f"must be {own.n_stages}, one for each stage")
    if request.n_kv_blocks > own.n_kv_blocks:
        raise InvalidRequest("n_kv_blocks", f"must not exceed {own.n_kv_blocks} on this stage")
    names = (request.pipeline_id, request.rendezvous_address, *request.members)
    if max(map(len, names)) > MAX_NAME_LENGTH:
        raise InvalidRequest("members", f"no name or address has over {MAX_NAME_LENGTH} characters")
