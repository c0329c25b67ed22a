"""The epoch of a stage: its number, and the joining of the stage's ranks.

The scheduler numbers epochs in ascending order. Plans and watchers of another epoch than the
current one are refused, and late answers of ranks to such an epoch are ignored.
"""

import asyncio
from collections.abc import Sequence

from orcinus.v1 import worker_pb2

from services.common.epochs import MAX_EPOCH, MAX_REACHED_EPOCH
from services.common.errors import InvalidRequest, StaleEpoch, Unavailable
from services.worker.channel import MessageKind
from services.worker.controller.rank_process import RankLink

JOIN_TIMEOUT_S = 50.0
"""Timeout in seconds for all ranks to join an epoch. It is shorter than the engine master's
timeout, so that the engine master receives the reason why joining failed."""


class Epoch:
    """The epoch that a stage is in, or was in last. Its number is 0 before the first epoch."""

    def __init__(self) -> None:
        self.pipeline_id = ""
        self.number = 0
        self._ranks: Sequence[RankLink] = ()
        self._joined: dict[int, worker_pb2.JoinPipelineResponse] = {}  # by tp_rank
        self._error = ""
        self._is_settled = asyncio.Event()  # all ranks have joined, or one of them cannot

    def attach(self, ranks: Sequence[RankLink]) -> None:
        """Sets the ranks of the stage, in the order of their tp_rank."""
        self._ranks = ranks

    def check(self, number: int) -> None:
        """Raises StaleEpoch unless `number` is the current epoch. The number 0 is never the current
        epoch."""
        if number == 0 or number != self.number:
            raise StaleEpoch(f"epoch {number} is not the current epoch {self.number}")

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the epoch's number is too large for any leader to have reached it (see
        `MAX_REACHED_EPOCH`)."""
        return self.number > MAX_REACHED_EPOCH

    def claim(self, number: int) -> None:
        """Makes `number` the current epoch, so that leaders of earlier terms are refused.

        A leader also claims an epoch to assign a stage. No pipeline ever joins that epoch.

        Raises:
            InvalidRequest: the number is above MAX_EPOCH.
            StaleEpoch: the number is not above the number of the current epoch.
        """
        if number > MAX_EPOCH:
            raise InvalidRequest("epoch", f"{number} is above {MAX_EPOCH}, the last of all terms")
        if number <= self.number:
            raise StaleEpoch(f"epoch {number} is not newer than epoch {self.number}")
        self.number = number

    def advance(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Makes the request's epoch the current epoch. Raises the same errors as `claim`."""
        self.claim(request.epoch)
        self.pipeline_id = request.pipeline_id

    async def join_ranks(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Makes all ranks leave their present epoch and join the current epoch of the stage.

        Raises:
            StaleEpoch: a newer epoch has begun in the meantime.
            Unavailable: a rank is lost, or did not find the ranks of the other stages.
        """
        self._joined.clear()
        self._error = ""
        self._is_settled.clear()
        for rank in self._ranks:
            # Ends a rank's wait for the other ranks of the old epoch.
            rank.send(MessageKind.LEAVE, str(request.epoch).encode())
            rank.send(MessageKind.JOIN, request.SerializeToString())
        try:
            await asyncio.wait_for(self._is_settled.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the ranks did not join epoch {request.epoch}") from None
        self.check(request.epoch)
        if self._error:
            raise Unavailable(self._error)

    @property
    def joined(self) -> worker_pb2.JoinPipelineResponse:
        """The stage's response to JoinPipeline, after its ranks have joined the epoch. `stored_kv`
        says, for each rank in order of tp_rank, which keys and values were in the rank's memory
        when it joined. `kept_blocks` lists the K/V blocks whose tokens the first rank knows, if the
        scheduler has asked for them. The response is empty if the keys and values of a rank do not
        outlive epochs."""
        nothing = worker_pb2.JoinPipelineResponse()
        told = [self._joined.get(tp_rank, nothing) for tp_rank in range(len(self._ranks))]
        if not all(each.stored_kv for each in told):
            return nothing
        answer = worker_pb2.JoinPipelineResponse(
            stored_kv=[stored for each in told for stored in each.stored_kv]
        )
        if told[0].HasField("kept_blocks"):
            answer.kept_blocks.CopyFrom(told[0].kept_blocks)
        return answer

    def note_joined(self, tp_rank: int, payload: bytes) -> None:
        """Records that a rank has joined an epoch. `payload` is the rank's message
        (`MessageKind.JOINED`)."""
        number, _, answer = payload.partition(b" ")
        if int(number) == self.number:
            self._joined[tp_rank] = worker_pb2.JoinPipelineResponse.FromString(answer)
        if len(self._joined) == len(self._ranks):
            self._is_settled.set()

    def note_not_joined(self, tp_rank: int, payload: bytes) -> None:
        """Records that a rank could not join an epoch. `payload` is the rank's message
        (`MessageKind.NOT_JOINED`)."""
        number, _, reason = payload.decode().partition(" ")
        if int(number) == self.number:
            self.give_up(f"rank {tp_rank}: {reason}")

    def give_up(self, reason: str) -> None:
        """Makes a running `join_ranks` raise Unavailable with `reason`, because the ranks cannot
        all join."""
        self._error = reason
        self._is_settled.set()
