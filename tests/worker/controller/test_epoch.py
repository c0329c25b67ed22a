"""Epochs of a stage: their numbers, and the ranks' way into them."""

import asyncio

import pytest
from orcinus.v1 import worker_pb2

from services.common.errors import StaleEpoch, Unavailable
from services.worker.channel import MessageKind
from services.worker.controller.epoch import Epoch
from tests.limits import HANG_S
from tests.worker.controller.recording_rank import RecordingRank


def request(epoch: int) -> worker_pb2.JoinPipelineRequest:
    return worker_pb2.JoinPipelineRequest(pipeline_id="p", epoch=epoch)


def epoch_of(n_ranks: int) -> tuple[Epoch, list[RecordingRank]]:
    epoch, ranks = Epoch(), [RecordingRank() for _ in range(n_ranks)]
    epoch.attach(ranks)
    return epoch, ranks


async def joining(epoch: Epoch, number: int) -> asyncio.Task[None]:
    """Advances, and lets the ranks be told to join."""
    epoch.advance(request(number))
    task = asyncio.create_task(epoch.join_ranks(request(number)))
    await asyncio.sleep(0)
    return task


async def test_only_a_newer_epoch_becomes_the_current_one() -> None:
    epoch, _ = epoch_of(1)
    epoch.advance(request(3))
    assert (epoch.pipeline_id, epoch.number) == ("p", 3)
    epoch.check(3)
    for stale in (2, 3):
        with pytest.raises(StaleEpoch, match=f"epoch {stale} is not newer than epoch 3"):
            epoch.advance(request(stale))
    with pytest.raises(StaleEpoch, match="epoch 4 is not the current epoch 3"):
        epoch.check(4)


def test_a_stage_that_never_joined_is_in_no_epoch() -> None:
    epoch, _ = epoch_of(1)
    with pytest.raises(StaleEpoch, match="epoch 0 is not the current epoch"):
        epoch.check(epoch.number)


async def test_ranks_are_told_to_leave_before_they_are_told_to_join() -> None:
    epoch, ranks = epoch_of(2)
    task = await joining(epoch, 3)
    for rank in ranks:
        assert rank.received == [
            (MessageKind.LEAVE, b"3"),
            (MessageKind.JOIN, request(3).SerializeToString()),
        ]
    task.cancel()


async def test_an_epoch_is_joined_when_all_ranks_have() -> None:
    epoch, _ = epoch_of(2)
    task = await joining(epoch, 3)
    epoch.note_joined(0, b"3")
    epoch.note_joined(1, b"2")  # late, of an epoch that is over
    await asyncio.sleep(0)
    assert not task.done()
    epoch.note_joined(1, b"3")
    await asyncio.wait_for(task, HANG_S)


async def test_a_rank_that_cannot_join_says_why() -> None:
    epoch, _ = epoch_of(2)
    task = await joining(epoch, 3)
    epoch.note_not_joined(0, b"2 of another epoch")
    epoch.note_not_joined(1, b"3 nobody answers")
    with pytest.raises(Unavailable, match="rank 1: nobody answers"):
        await asyncio.wait_for(task, HANG_S)


async def test_nobody_waits_for_ranks_that_are_lost() -> None:
    epoch, _ = epoch_of(2)
    task = await joining(epoch, 3)
    epoch.give_up("rank 0 exited")
    with pytest.raises(Unavailable, match="rank 0 exited"):
        await asyncio.wait_for(task, HANG_S)
    again = await joining(epoch, 4)
    assert not again.done(), "the next attempt begins without the old reason"
    again.cancel()


async def test_a_newer_epoch_ends_the_wait_for_an_older_one() -> None:
    epoch, _ = epoch_of(1)
    old = await joining(epoch, 3)
    new = await joining(epoch, 4)
    epoch.note_joined(0, b"4")
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(old, HANG_S)
    await asyncio.wait_for(new, HANG_S)
