"""Orders to compile a grammar: each waits for all ranks, and for no longer than its epoch."""

import asyncio

import pytest
from orcinus.v1 import worker_pb2

from services.common.errors import StaleEpoch
from services.worker.channel import MessageKind
from services.worker.controller.epoch import Epoch
from services.worker.controller.grammar_orders import GrammarOrders
from tests.worker.controller.recording_rank import RecordingRank

GRAMMAR = worker_pb2.PrepareGrammarRequest(digest=b"d", grammar="start: /d/")


def answer(digest: bytes = b"d", failure: str = "") -> bytes:
    return worker_pb2.PrepareGrammarResponse(digest=digest, failure=failure).SerializeToString()


def orders_for(*ranks: RecordingRank) -> GrammarOrders:
    epoch = Epoch()
    epoch.claim(1)
    orders = GrammarOrders(epoch)
    orders.attach(ranks)
    return orders


async def ordered(orders: GrammarOrders) -> "asyncio.Task[worker_pb2.PrepareGrammarResponse]":
    task = asyncio.create_task(orders.prepare(GRAMMAR, epoch=1))
    await asyncio.sleep(0)
    return task


async def test_an_order_is_done_when_every_rank_has_the_grammar() -> None:
    ranks = RecordingRank(), RecordingRank()
    orders = orders_for(*ranks)
    task = await ordered(orders)
    expected = [(MessageKind.PREPARE_GRAMMAR, GRAMMAR.SerializeToString())]
    assert [rank.received for rank in ranks] == [expected, expected]
    for tp_rank, payload in ((0, answer()), (0, answer()), (1, answer(b"another"))):
        orders.note_answer(tp_rank, payload)
    await asyncio.sleep(0)
    assert not task.done()
    orders.note_answer(1, answer())
    assert (await task).failure == ""
    orders.note_answer(1, answer())  # to an order that is done


async def test_the_first_failure_is_the_answer() -> None:
    orders = orders_for(RecordingRank(), RecordingRank())
    task = await ordered(orders)
    orders.note_answer(1, answer(failure="too large"))
    orders.note_answer(0, answer())
    assert (await task).failure == "too large"


async def test_an_order_ends_with_its_epoch() -> None:
    orders = orders_for(RecordingRank())
    with pytest.raises(StaleEpoch):
        await orders.prepare(GRAMMAR, epoch=2)
    task = await ordered(orders)
    orders.end()
    with pytest.raises(StaleEpoch):
        await task


async def test_an_order_that_is_given_up_can_be_given_again() -> None:
    orders = orders_for(RecordingRank())
    given_up = await ordered(orders)
    given_up.cancel()
    await asyncio.wait([given_up])
    task = await ordered(orders)
    orders.note_answer(0, answer())
    assert (await task).digest == b"d"
