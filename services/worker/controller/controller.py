"""The controller of one stage (Orca, section 4.1).

It hands every plan to its ranks and, at once, the same bytes to the next stage: that stage knows
what will come before the activations do. It never decodes a plan and never waits for a rank. What
its ranks report it passes to those who watch the stage, and a sign of life every second, as long
as all its ranks give theirs.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

import grpc.aio
from orcinus.v1 import worker_pb2

from services.common import rpc
from services.common.errors import StaleEpoch, Unavailable
from services.common.protocol import PROTOCOL
from services.worker.channel import MessageKind
from services.worker.controller.profile_orders import Profiles
from services.worker.controller.stage_tracer import StageTracer

log = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
RUN_ITERATIONS = rpc.method_path(SERVICE, "RunIterations")
MAX_UNREAD_REPORTS = 4096
"""Reports that wait for one watcher, at most."""

HEARTBEAT_S = 1.0
"""How often the stage gives a sign of life; ranks give theirs more often."""

JOIN_TIMEOUT_S = 50.0
"""Less than the engine master's, so that it hears the reason before it gives up."""


class Rank(Protocol):
    """What the controller needs of a rank."""

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Queues a frame for the rank; never waits."""


class Controller:
    """One stage, in at most one epoch at a time."""

    def __init__(
        self, *, tp_size: int, connect: rpc.Connect = rpc.connect, profiles: Profiles | None = None
    ) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the stage cannot go on."""
        self.tp_size = tp_size
        self.n_plans = 0
        """Plans handed on."""
        self.n_heartbeats = 0
        """Signs of life given."""
        self.tracer: StageTracer | None = None
        """Who makes spans of recorded iterations, if anybody does."""
        self.profiles = profiles or Profiles(None)
        self._connect = connect
        self._n_missed: dict[int, int] = {}  # signs of life, of each rank that has given one
        self._ranks: list[Rank] = []
        self._descriptions: dict[int, worker_pb2.DescribeResponse] = {}
        self._loaded = asyncio.Event()
        self._pipeline_id = ""
        self._epoch = 0
        self._joined: set[int] = set()
        self._join_error = ""
        self._all_joined = asyncio.Event()
        self._watchers: list[asyncio.Queue[bytes | None]] = []
        self._plan_streams: set[asyncio.Task[Any]] = set()
        self._next_channel: grpc.aio.Channel | None = None
        self._next: grpc.aio.StreamUnaryCall[bytes, bytes] | None = None

    def attach(self, ranks: Sequence[Rank]) -> None:
        """Takes the ranks of the stage, in the order of their tp_rank."""
        self._ranks = list(ranks)
        self.profiles.attach(ranks)

    async def wait_until_loaded(self) -> None:
        """Waits until every rank has its weights."""
        await self._loaded.wait()

    async def watch_ranks(self, silence_limit_s: float) -> None:
        """Gives the stage's signs of life, until a rank is lost."""
        while not self.failure.done():
            await asyncio.sleep(HEARTBEAT_S)
            self.check_ranks(silence_limit_s)

    def check_ranks(self, silence_limit_s: float) -> None:
        """Gives one sign of life, if all ranks have given theirs since the last call; one that has
        not for too long is lost. Called every HEARTBEAT_S.

        What is counted are calls, not seconds: when the controller itself did not run for a while,
        signs of life may lie unread.
        """
        for tp_rank, n_missed in self._n_missed.items():
            if n_missed * HEARTBEAT_S >= silence_limit_s:
                self._fail(f"rank {tp_rank} has given no sign of life for {silence_limit_s:g} s")
                return
        if len(self._n_missed) == self.tp_size and not any(self._n_missed.values()):
            self.n_heartbeats += 1
            self._publish(
                worker_pb2.WatchStageResponse(
                    pipeline_id=self._pipeline_id,
                    epoch=self._epoch,
                    heartbeat=worker_pb2.StageHeartbeat(),
                ).SerializeToString()
            )
        for tp_rank in self._n_missed:
            self._n_missed[tp_rank] += 1

    @property
    def n_ranks_alive(self) -> int:
        """Ranks that give their signs of life; between two checks one may have yet to come."""
        return sum(n_missed <= 1 for n_missed in list(self._n_missed.values()))

    @property
    def epoch(self) -> int:
        """The epoch it is in, or was in last; 0 before the first."""
        return self._epoch

    def describe(self) -> worker_pb2.DescribeResponse:
        """What the stage is.

        Raises:
            Unavailable: not all ranks have loaded.
        """
        if not self._loaded.is_set():
            raise Unavailable("the stage is loading its weights")
        description = worker_pb2.DescribeResponse()
        description.CopyFrom(self._descriptions[0])
        description.n_kv_blocks = min(item.n_kv_blocks for item in self._descriptions.values())
        description.epoch = self._epoch
        description.protocol = PROTOCOL
        return description

    async def join(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Leaves the epoch it is in and joins a newer one.

        Raises:
            StaleEpoch: the epoch is not newer.
            Unavailable: the ranks did not find those of the other stages, or one of ours is lost.
        """
        if self.failure.done():
            raise Unavailable(self.failure.result())
        if request.epoch <= self._epoch:
            raise StaleEpoch(f"epoch {request.epoch} is not newer than epoch {self._epoch}")
        self._pipeline_id, self._epoch = request.pipeline_id, request.epoch
        await self._leave()
        self._check_current(request.epoch)  # a newer one may have come while this one waited
        self._joined.clear()
        self._join_error = ""
        self._all_joined.clear()
        if self.tracer is not None:
            self.tracer.joined(request.epoch)
        for rank in self._ranks:
            # It may still wait for the ranks of the old epoch, in vain.
            rank.send(MessageKind.LEAVE, str(request.epoch).encode())
            rank.send(MessageKind.JOIN, request.SerializeToString())
        try:
            await asyncio.wait_for(self._all_joined.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the ranks did not join epoch {request.epoch}") from None
        self._check_current(request.epoch)
        if self._join_error:
            raise Unavailable(self._join_error)
        if request.stage_index + 1 < len(request.members):
            self._next_channel = self._connect(request.members[request.stage_index + 1])
            self._next_channel.get_state(try_to_connect=True)

    async def run(self, context: Any) -> None:
        """Hands on the plans of one stream until its sender has no more.

        Raises:
            StaleEpoch: the stream's epoch is over.
        """
        epoch = rpc.epoch_of(context)
        self._check_current(epoch)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not in a task")
        self._plan_streams.add(task)
        try:
            while (plan := await context.read()) is not grpc.aio.EOF:
                await self.hand_on(plan)
        except asyncio.CancelledError:
            if task.cancelling() and epoch != self._epoch:
                task.uncancel()
                self._check_current(epoch)
            raise
        finally:
            self._plan_streams.discard(task)

    async def hand_on(self, plan: bytes) -> None:
        """Gives a plan's bytes to the ranks, then to the next stage."""
        self.n_plans += 1
        if self.tracer is not None:
            self.tracer.handed_on(time.time_ns())
        for rank in self._ranks:
            rank.send(MessageKind.PLAN, plan)
        if self._next_channel is None:
            return
        if self._next is None:
            # Not before the first plan: only then is it certain that the next stage has joined too.
            self._next = self._call_next(self._next_channel)
        try:
            await self._next.write(plan)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # A dead neighbour is no failure of this stage, but it is the end of the epoch.
            await self._hang_up()
            self._report_failure(f"the next stage takes no more plans: {error}")

    @contextlib.contextmanager
    def watch(self, epoch: int) -> Iterator[AsyncIterator[bytes]]:
        """Reports of the ranks that come inside the `with` block.

        Raises:
            StaleEpoch: the epoch is not the current one; the iterator raises it when it is over.
        """
        self._check_current(epoch)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.append(queue)
        try:
            yield self._reports(queue, epoch)
        finally:
            if queue in self._watchers:
                self._watchers.remove(queue)

    async def close(self) -> None:
        """Ends the epoch and all streams."""
        await self._leave()

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """A rank sent a frame."""
        if kind is MessageKind.HEARTBEAT:
            self._n_missed[tp_rank] = 0
        elif kind is MessageKind.REPORT:
            self._publish(payload)
        elif kind is MessageKind.JOINED:
            self._note_joined(tp_rank, int(payload))
        elif kind is MessageKind.NOT_JOINED:
            self._note_not_joined(tp_rank, payload.decode())
        elif kind is MessageKind.LOADED:
            self._descriptions[tp_rank] = worker_pb2.DescribeResponse.FromString(payload)
            if len(self._descriptions) == self.tp_size:
                self._loaded.set()
        elif kind is MessageKind.FAILURE:
            self._fail(f"rank {tp_rank}: {payload.decode()}")
        else:
            self._on_recording(kind, payload)

    def _on_recording(self, kind: MessageKind, payload: bytes) -> None:
        if kind in (MessageKind.PROFILED, MessageKind.NOT_PROFILED):
            self.profiles.on_message(kind, payload)
        elif kind is MessageKind.TRACE and self.tracer is not None:
            self.tracer.record(payload)

    def on_exit(self, tp_rank: int, reason: str) -> None:
        """A rank is gone; the stage cannot go on."""
        self._fail(f"rank {tp_rank} {reason}")

    def _note_joined(self, tp_rank: int, epoch: int) -> None:
        if epoch == self._epoch:
            self._joined.add(tp_rank)
        if len(self._joined) == self.tp_size:
            self._all_joined.set()

    def _note_not_joined(self, tp_rank: int, message: str) -> None:
        epoch, _, reason = message.partition(" ")
        if int(epoch) == self._epoch:
            self._join_error = f"rank {tp_rank}: {reason}"
            self._all_joined.set()

    def _publish(self, report: bytes) -> None:
        for queue in list(self._watchers):
            if queue.qsize() < MAX_UNREAD_REPORTS:
                queue.put_nowait(report)
            else:  # let go; to the engine master it is the end of the stage's reports
                queue.put_nowait(None)
                self._watchers.remove(queue)

    def _fail(self, reason: str) -> None:
        if self.failure.done():
            return
        self.failure.set_result(reason)
        self._join_error = reason
        self._all_joined.set()
        self._report_failure(reason)

    def _report_failure(self, reason: str) -> None:
        report = worker_pb2.WatchStageResponse(
            pipeline_id=self._pipeline_id,
            epoch=self._epoch,
            failure=worker_pb2.StageFailure(reason=reason),
        )
        self._publish(report.SerializeToString())

    async def _reports(
        self, queue: asyncio.Queue[bytes | None], epoch: int
    ) -> AsyncIterator[bytes]:
        while (report := await queue.get()) is not None:
            yield report
        self._check_current(epoch)

    def _check_current(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"epoch {epoch} is not the current epoch {self._epoch}")

    def _call_next(self, channel: grpc.aio.Channel) -> "grpc.aio.StreamUnaryCall[bytes, bytes]":
        method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes]
        method = channel.stream_unary(RUN_ITERATIONS)
        return method(metadata=rpc.epoch_metadata(self._epoch))

    async def _leave(self) -> None:
        for task in self._plan_streams:
            task.cancel()
        for queue in self._watchers:
            queue.put_nowait(None)
        self._watchers.clear()
        await self._hang_up()

    async def _hang_up(self) -> None:
        channel, self._next_channel, self._next = self._next_channel, None, None
        if channel is not None:
            await channel.close(grace=None)
