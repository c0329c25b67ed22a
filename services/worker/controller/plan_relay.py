"""Receives plans by RunIterations, and forwards them to the ranks and to the next stage.

Plans are forwarded as bytes, without decoding. Each plan is sent to the next stage at once, so that
the plan arrives there before the activations (Orca, section 4.1).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio
from orcinus.v1 import worker_pb2

from services.common import rpc
from services.worker.channel import MessageKind
from services.worker.controller.epoch import Epoch
from services.worker.controller.rank_process import RankLink
from services.worker.controller.stage_tracer import StageTracer

RUN_ITERATIONS = rpc.method_path(
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"], "RunIterations"
)


class PlanRelay:
    """Forwards the plans that this stage receives to its ranks and to the next stage."""

    def __init__(
        self, epoch: Epoch, *, connect: rpc.Connect, on_next_lost: Callable[[str], None]
    ) -> None:
        """`on_next_lost` is called with the reason when the stream to the next stage breaks."""
        self.n_plans = 0
        """Number of plans that have been forwarded since the process started."""
        self._epoch = epoch
        self._connect = connect
        self._on_next_lost = on_next_lost
        self._ranks: Sequence[RankLink] = ()
        self._tracer: StageTracer | None = None
        self._streams: set[asyncio.Task[Any]] = set()
        self._next_channel: grpc.aio.Channel | None = None
        self._next: grpc.aio.StreamUnaryCall[bytes, bytes] | None = None

    def attach(self, ranks: Sequence[RankLink], *, tracer: StageTracer | None = None) -> None:
        """Sets the ranks of the stage, and the tracer that is notified of every forwarded plan."""
        self._ranks = ranks
        self._tracer = tracer

    def open(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Connects to the next stage of the epoch, if there is one."""
        if request.stage_index + 1 < len(request.members):
            self._next_channel = self._connect(request.members[request.stage_index + 1])
            self._next_channel.get_state(try_to_connect=True)

    async def run(self, context: Any) -> None:
        """Forwards the plans that arrive on one stream, until the stream ends.

        Raises:
            StaleEpoch: the stream's epoch is over.
        """
        epoch = rpc.epoch_of(context)
        self._epoch.check(epoch)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not in a task")
        self._streams.add(task)
        try:
            while (plan := await context.read()) is not grpc.aio.EOF:
                await self.forward(plan)
        except asyncio.CancelledError:
            if task.cancelling() and epoch != self._epoch.number:
                task.uncancel()
                self._epoch.check(epoch)
            raise
        finally:
            self._streams.discard(task)

    async def forward(self, plan: bytes) -> None:
        """Sends the bytes of a plan to the ranks, then to the next stage."""
        self.n_plans += 1
        if self._tracer is not None:
            self._tracer.forwarded(time.time_ns())
        for rank in self._ranks:
            rank.send(MessageKind.PLAN, plan)
        if self._next_channel is None:
            return
        if self._next is None:
            # Opened with the first plan: only then is it certain that the next stage has joined.
            self._next = self._call_next(self._next_channel)
        try:
            await self._next.write(plan)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The loss of a neighbour is not a failure of this stage, but it ends the epoch.
            await self._hang_up()
            self._on_next_lost(f"the next stage takes no more plans: {error}")

    async def close(self) -> None:
        """Ends the epoch's two streams, from the previous stage and to the next stage."""
        for task in self._streams:
            task.cancel()
        await self._hang_up()

    def _call_next(self, channel: grpc.aio.Channel) -> "grpc.aio.StreamUnaryCall[bytes, bytes]":
        method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes]
        method = channel.stream_unary(RUN_ITERATIONS)
        return method(metadata=rpc.epoch_metadata(self._epoch.number))

    async def _hang_up(self) -> None:
        channel, self._next_channel, self._next = self._next_channel, None, None
        if channel is not None:
            await channel.close(grace=None)
