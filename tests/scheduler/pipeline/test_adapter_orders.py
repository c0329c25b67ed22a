"""A load has ended when all ranks of all stages have it, and they must have read the same bytes."""

import asyncio

import pytest
from orcinus.v1 import worker_pb2

from services.common.failure_text import MAX_FAILURE_LENGTH
from services.scheduler.core.admission.adapter_gate import AdapterChange
from services.scheduler.pipeline.adapter_orders import AdapterOrders, LoadOutcome
from services.scheduler.pipeline.membership import Member, Pipeline

A, B = "a" * 64, "b" * 64


class Epoch:
    """The orders of an epoch with two stages of two ranks."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.sent: list[worker_pb2.RunIterationsRequest] = []
        self.n_wakes = 0
        description = worker_pb2.DescribeResponse(tp_size=2)
        members = tuple(Member(f"host{i}:1", description) for i in range(2))
        pipeline = Pipeline("p", 7, members)
        self.orders = AdapterOrders(pipeline, write=self._write, wake=self._wake, limit_s=limit_s)

    async def _write(self, message: worker_pb2.RunIterationsRequest) -> None:
        self.sent.append(message)

    def _wake(self) -> None:
        self.n_wakes += 1

    async def load(self, load_id: int = 1, digest: str = "") -> None:
        await self.orders.order(AdapterChange((), load_id, "law", "/adapters/law", digest))

    def report(
        self, stage: int, rank: int, digest: str = A, failure: str = "", *, of: int = 1
    ) -> None:
        self.orders.note(
            stage,
            worker_pb2.AdapterReport(load_id=of, tp_rank=rank, digest=digest, failure=failure),
        )


@pytest.fixture
def ranks() -> tuple[tuple[int, int], ...]:
    return ((0, 0), (0, 1), (1, 0), (1, 1))


async def test_all_ranks_of_all_stages_must_have_it(ranks: tuple[tuple[int, int], ...]) -> None:
    epoch = Epoch()
    await epoch.load()
    (message,) = epoch.sent
    assert (message.pipeline_id, message.epoch, message.iteration) == ("p", 7, 0)
    assert message.adapter_order == worker_pb2.AdapterOrder(
        load_id=1, name="law", source="/adapters/law"
    )
    for stage, rank in ranks:
        assert not epoch.orders.take()
        epoch.report(stage, rank)
    assert epoch.orders.take() == [LoadOutcome(1, A, "")]
    assert epoch.n_wakes == 1
    assert epoch.orders.take() == []


async def test_ranks_that_have_read_other_bytes_end_the_load() -> None:
    epoch = Epoch()
    await epoch.load()
    epoch.report(0, 0, A)
    epoch.report(1, 0, B)
    assert epoch.orders.take() == [LoadOutcome(1, "", "the workers have read different files")]


async def test_all_ranks_must_have_read_what_was_loaded_first() -> None:
    epoch = Epoch()
    await epoch.load(digest=B)
    epoch.report(0, 0, A)
    ((_, digest, failure),) = epoch.orders.take()
    assert not digest
    assert failure


async def test_the_first_failure_ends_the_load_and_later_reports_change_nothing(
    ranks: tuple[tuple[int, int], ...],
) -> None:
    epoch = Epoch()
    await epoch.load()
    epoch.report(0, 0)
    epoch.report(0, 1, "", "broken")
    assert epoch.orders.take() == [LoadOutcome(1, "", "broken")]
    await epoch.load(2)
    for stage, rank in ranks:
        epoch.report(stage, rank, of=1)
    assert epoch.orders.take() == []
    for stage, rank in ranks:
        epoch.report(stage, rank, B, of=2)
    assert epoch.orders.take() == [LoadOutcome(2, B, "")]


async def test_the_text_of_a_failure_is_short_and_printable() -> None:
    epoch = Epoch()
    await epoch.load()
    epoch.report(0, 0, "", "bro\nken" + "x" * 4_000_000)
    ((_, _, failure),) = epoch.orders.take()
    assert failure == "bro?ken" + "x" * (MAX_FAILURE_LENGTH - 7)


async def test_a_load_has_a_limit() -> None:
    epoch = Epoch(limit_s=0.01)
    await epoch.load()
    async with asyncio.timeout(20):
        while not epoch.n_wakes:
            await asyncio.sleep(0.01)
    ((load_id, digest, failure),) = epoch.orders.take()
    assert (load_id, digest) == (1, "")
    assert "0.01 s" in failure


async def test_dropping_alone_awaits_nothing() -> None:
    epoch = Epoch(limit_s=0)
    await epoch.orders.order(AdapterChange((3, 4)))
    assert list(epoch.sent[0].adapter_order.dropped) == [3, 4]
    await asyncio.sleep(0)
    assert epoch.orders.take() == []
