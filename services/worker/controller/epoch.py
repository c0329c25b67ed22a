"""The epoch of a stage: its number, and how the ranks of the stage come into it.

The scheduler numbers epochs, and numbers grow. A plan, a watch or a late answer of a rank that
belongs to another epoch than the current one is refused.
"""

import asyncio
from collections.abc import Sequence

from orcinus.v1 import worker_pb2

from services.common.epochs import MAX_EPOCH, MAX_REACHED_EPOCH
from services.common.errors import InvalidRequest, StaleEpoch, Unavailable
from services.worker.channel import MessageKind
from services.worker.controller.rank_process import RankLink

JOIN_TIMEOUT_S = 50.0
"""Time for all ranks to join; less than the engine master's, which hears the reason before it
gives up."""


class Epoch:
    """The epoch that a stage is in, or was in last; its number is 0 before the first."""

    def __init__(self) -> None:
        self.pipeline_id = ""
        self.number = 0
        self._ranks: Sequence[RankLink] = ()
        self._joined: set[int] = set()
        self._error = ""
        self._is_settled = asyncio.Event()  # all ranks have joined, or one of them cannot

    def attach(self, ranks: Sequence[RankLink]) -> None:
        """Takes the ranks of the stage, in the order of their tp_rank."""
        self._ranks = ranks

    def check(self, number: int) -> None:
        """Raises StaleEpoch unless `number` is the current epoch; 0 is none, before the first."""
        if number == 0 or number != self.number:
            raise StaleEpoch(f"epoch {number} is not the current epoch {self.number}")

    @property
    def is_out_of_reach(self) -> bool:
        """Whether no leader can have reached the newest epoch that is known, or go beyond it."""
        return self.number > MAX_REACHED_EPOCH

    def claim(self, number: int) -> None:
        """Makes an epoch the newest that is known, in which a leader assigns a stage and which no
        pipeline has: a leader of an earlier term is refused from now on.

        Raises:
            InvalidRequest: no term has such an epoch.
            StaleEpoch: it is not newer.
        """
        if number > MAX_EPOCH:
            raise InvalidRequest("epoch", f"{number} is above {MAX_EPOCH}, the last of all terms")
        if number <= self.number:
            raise StaleEpoch(f"epoch {number} is not newer than epoch {self.number}")
        self.number = number

    def advance(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Makes the request's epoch the current one; raises as `claim`."""
        self.claim(request.epoch)
        self.pipeline_id = request.pipeline_id

    async def join_ranks(self, request: worker_pb2.JoinPipelineRequest) -> None:
        """Has all ranks leave the epoch they are in and join the current one.

        Raises:
            StaleEpoch: a newer epoch has begun in the meantime.
            Unavailable: a rank did not find those of the other stages, or is lost.
        """
        self._joined.clear()
        self._error = ""
        self._is_settled.clear()
        for rank in self._ranks:
            # A rank may still wait for the ranks of the old epoch, in vain.
            rank.send(MessageKind.LEAVE, str(request.epoch).encode())
            rank.send(MessageKind.JOIN, request.SerializeToString())
        try:
            await asyncio.wait_for(self._is_settled.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the ranks did not join epoch {request.epoch}") from None
        self.check(request.epoch)
        if self._error:
            raise Unavailable(self._error)

    def note_joined(self, tp_rank: int, payload: bytes) -> None:
        """Takes a rank's word that it has joined an epoch (`MessageKind.JOINED`)."""
        if int(payload) == self.number:
            self._joined.add(tp_rank)
        if len(self._joined) == len(self._ranks):
            self._is_settled.set()

    def note_not_joined(self, tp_rank: int, payload: bytes) -> None:
        """Takes a rank's reason for not joining an epoch (`MessageKind.NOT_JOINED`)."""
        number, _, reason = payload.decode().partition(" ")
        if int(number) == self.number:
            self.give_up(f"rank {tp_rank}: {reason}")

    def give_up(self, reason: str) -> None:
        """Ends the wait for ranks that join, if there is one: they cannot all join any more."""
        self._error = reason
        self._is_settled.set()
