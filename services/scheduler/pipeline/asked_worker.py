"""A worker that the leader asks repeatedly for its description, and to which the leader may assign
a stage."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.common.outage_log import OutageLog
from services.scheduler.cluster.leader_watch import ProbeResult
from services.scheduler.cluster.leader_watch import ask as probe
from services.scheduler.pipeline.muster import Offer, Presence

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Seconds between two questions to one worker for its description."""

SOON_S = 0.03
"""Seconds between two questions to a worker that was assigned a stage a moment ago. The worker may
take the place of a lost one and find its weights in memory; then it loads in a fraction of a
second."""

MOMENT_S = 2.0
"""Seconds after an assignment during which the worker is asked every `SOON_S`."""

RETURN_S = 1.0
"""Seconds after the loss of a pipeline. A worker that was taken for lost and answers within this
time was taken for lost too soon: a new epoch takes about as long as waiting would have."""

DESCRIBE_TIMEOUT_S = 3.0
"""Seconds to wait for a worker's answer. After that, the worker has failed to answer, and the
assignment of stages no longer waits for it."""

CLAIM_S = 10.0
"""Seconds for which a stage is not assigned to another worker after the worker that holds the stage
has stopped answering. The silent worker may be busy. If its host refuses connections, its process
has ended, and a free worker that fits gets the stage at once."""


class AskedWorker:
    """Asks one worker repeatedly for its description, and assigns stages to it."""

    def __init__(
        self,
        address: str,
        connect: rpc.Connect,
        on_news: Callable[[], None],
        *,
        last: worker_pb2.DescribeResponse | None = None,
        is_gone: bool = False,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        """`last` is the worker's description as a member of a pipeline that was lost. `is_gone`
        says that the pipeline was lost because this worker was silent or the connection to it
        broke. Then `is_settled` is true from the beginning, and `on_return` is called if the same
        process answers within `RETURN_S`. `on_news` is called after each answer or failure to
        answer."""
        self.address = address
        self.description: worker_pb2.DescribeResponse | None = None
        """The worker's latest answer; None if the worker did not answer the latest question."""
        self.trouble = ""
        self.is_settled = is_gone
        """Whether the worker has answered or failed to answer since a stage was last assigned to
        it."""
        self._channel = connect(address, rpc.RECONNECT_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._on_news = on_news
        self._outage = OutageLog.of_peer(log, f"the worker at {address}")
        self._has_answered = False
        self._order: worker_pb2.AssignStageRequest | None = None
        self._has_order = asyncio.Event()
        self._ordered_at = -math.inf
        # What the worker answered or was ordered last, and until when it may still be that.
        self._last: worker_pb2.DescribeResponse | None = None
        self._last_until = 0.0
        self._on_return = on_return
        now = asyncio.get_running_loop().time()
        self._returns_until = now + RETURN_S if is_gone else -math.inf
        # Whether the worker's host refuses connections, or the last pipeline has lost it.
        self._has_ended = is_gone
        if last is not None:
            self._note(last)
        self._asking = asyncio.create_task(self._ask_on())

    @property
    def offer(self) -> Offer | None:
        """The worker as described by its last answer or assignment. None if it has neither answered
        nor been assigned a stage in the last `CLAIM_S` seconds."""
        if self.description is not None:
            return Offer(self.address, self.description)
        if self._last is None or asyncio.get_running_loop().time() >= self._last_until:
            return None
        presence = Presence.ENDED if self._has_ended else Presence.SILENT
        return Offer(self.address, self._last, presence)

    def assign(self, order: worker_pb2.AssignStageRequest) -> None:
        """Assigns a stage to the worker. `is_settled` is false until the worker has answered, or
        failed to answer, after this order."""
        log.info("stage %d is assigned to %s", order.stage_index, self.address)
        self.recall(order)

    def recall(self, order: worker_pb2.AssignStageRequest) -> None:
        """Sends `order` to the worker. A worker without a stage loads the stage that `order` names.
        A worker that holds another stage ends, and starts again without a stage. `is_settled` is
        false until the worker has answered, or failed to answer, after this order."""
        self._order, self._ordered_at = order, asyncio.get_running_loop().time()
        self._has_order.set()
        last = worker_pb2.DescribeResponse()
        if self.description is not None:
            last.CopyFrom(self.description)
        last.state = worker_pb2.WORKER_STATE_LOADING
        last.stage_index, last.n_stages = order.stage_index, order.n_stages
        self.description, self.is_settled = None, False
        self._note(last)

    async def close(self) -> None:
        """Stops asking the worker, and closes the channel to it."""
        self._asking.cancel()
        await asyncio.wait((self._asking,))
        await self._channel.close(grace=None)

    async def _ask_on(self) -> None:
        while True:
            order, self._order = self._order, None
            self._has_order.clear()
            try:
                if order is not None:
                    await self._stub.AssignStage(order, timeout=DESCRIBE_TIMEOUT_S)
                answer = await self._stub.Describe(
                    worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                is_away = error.code() is grpc.StatusCode.UNAVAILABLE
                if is_away and await probe(self.address) is ProbeResult.REFUSES:
                    self._has_ended = True
                # A worker that has never answered is to start yet: a spare starts last. Where it is
                # missing, the message about the stages names it.
                if self._has_answered:
                    self._outage.failed(error.details() or error.code().name)
                self._take(None, f"worker at {self.address}: {error.details()}")
            else:
                self._outage.worked()
                self._has_ended, self._has_answered = False, True
                self._take(answer, "")
            is_soon = asyncio.get_running_loop().time() < self._ordered_at + MOMENT_S
            # Not `asyncio.wait_for`, which may swallow a cancellation that comes with the order.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON_S if is_soon else RETRY_S):
                    await self._has_order.wait()

    def _take(self, answer: worker_pb2.DescribeResponse | None, trouble: str) -> None:
        if self._order is not None:
            return  # the answer is older than the order
        self.description, self.trouble, self.is_settled = answer, trouble, True
        if answer is not None:
            self._note_return(answer)
            self._note(answer)
        self._on_news()

    def _note_return(self, answer: worker_pb2.DescribeResponse) -> None:
        until, self._returns_until = self._returns_until, -math.inf
        is_same = self._last is not None and answer.process == self._last.process
        if is_same and asyncio.get_running_loop().time() < until:
            self._on_return()

    def _note(self, last: worker_pb2.DescribeResponse) -> None:
        self._last = last
        self._last_until = asyncio.get_running_loop().time() + CLAIM_S
