"""Orders by which all ranks of a stage compile a grammar.

An order is complete when every rank has answered. Ranks compile in a thread while they compute
iterations, so an order delays no plan.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from orcinus.v1 import worker_pb2

from services.common.errors import StaleEpoch
from services.worker.channel import MessageKind
from services.worker.controller.epoch import Epoch
from services.worker.controller.rank_process import RankLink


@dataclass(frozen=True, slots=True)
class _Order:
    """An order to compile a grammar: the tp_ranks of the ranks that have not answered yet, and the
    future of the response."""

    missing: set[int]
    answer: "asyncio.Future[worker_pb2.PrepareGrammarResponse]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class GrammarOrders:
    """Makes all ranks compile grammars, and keeps the unfinished orders of the current epoch."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._ranks: Sequence[RankLink] = ()
        self._orders: dict[bytes, _Order] = {}

    def attach(self, ranks: Sequence[RankLink]) -> None:
        """Sets the ranks of the stage, in the order of their tp_rank."""
        self._ranks = ranks

    async def prepare(
        self, request: worker_pb2.PrepareGrammarRequest, *, epoch: int
    ) -> worker_pb2.PrepareGrammarResponse:
        """Makes all ranks compile a grammar. Returns the response of the first rank that fails, or,
        if all succeed, the response of the last rank to answer, which has no failure. This method
        has no timeout; the caller must set one.

        Raises:
            StaleEpoch: the epoch is over, or ends during the wait.
        """
        self._epoch.check(epoch)
        order = self._orders[request.digest] = _Order(set(range(len(self._ranks))))
        payload = request.SerializeToString()
        for rank in self._ranks:
            rank.send(MessageKind.PREPARE_GRAMMAR, payload)
        try:
            return await order.answer
        finally:
            if self._orders.get(request.digest) is order:
                del self._orders[request.digest]

    def note_answer(self, tp_rank: int, payload: bytes) -> None:
        """Handles a rank's message that it has compiled a grammar, or why it could not. Ignores the
        message if nothing waits for the answer any more."""
        answer = worker_pb2.PrepareGrammarResponse.FromString(payload)
        order = self._orders.get(answer.digest)
        if order is None or order.answer.done():
            return
        order.missing.discard(tp_rank)
        if answer.failure or not order.missing:
            order.answer.set_result(answer)

    def end(self) -> None:
        """Cancels all orders, because their epoch is over."""
        for order in self._orders.values():
            if not order.answer.done():
                order.answer.set_exception(StaleEpoch("the epoch of the grammar is over"))
