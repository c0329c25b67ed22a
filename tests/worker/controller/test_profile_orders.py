"""Orders for profiles: who may order one, and what the caller hears of it."""

import asyncio
from pathlib import Path

import pytest
from orcinus.v1 import worker_pb2

from services.common.errors import InvalidRequest, PermissionDenied, Unavailable
from services.worker.channel import MessageKind
from services.worker.controller.profile_orders import MAX_ITERATIONS, ProfileOrders


class OrderedRank:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.orders: list[tuple[MessageKind, bytes]] = []

    def send(self, kind: MessageKind, payload: bytes) -> None:
        self.orders.append((kind, payload))


def profiles_in(directory: Path | None, rank: OrderedRank) -> ProfileOrders:
    profiles = ProfileOrders(directory)
    profiles.attach([rank], stage_index=2)
    return profiles


def request(n_iterations: int = 3, tp_rank: int = 0) -> worker_pb2.ProfileRequest:
    return worker_pb2.ProfileRequest(n_iterations=n_iterations, tp_rank=tp_rank)


async def test_without_a_directory_there_are_no_profiles() -> None:
    rank = OrderedRank()
    with pytest.raises(PermissionDenied, match="profile_dir"):
        await profiles_in(None, rank).take(request())
    assert not rank.orders


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(0), "n_iterations"),
        (request(MAX_ITERATIONS + 1), "n_iterations"),
        (request(tp_rank=1), "tp_rank"),
    ],
    ids=["nothing", "too much", "no such rank"],
)
async def test_what_cannot_be_is_refused(
    tmp_path: Path, asked: worker_pb2.ProfileRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await profiles_in(tmp_path, OrderedRank()).take(asked)
    assert caught.value.field == field


async def test_the_caller_waits_for_the_file_and_others_do_not(tmp_path: Path) -> None:
    rank = OrderedRank()
    profiles = profiles_in(tmp_path, rank)
    taking = asyncio.create_task(profiles.take(request()))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await profiles.take(request())
    [(kind, payload)] = rank.orders
    n_iterations, _, path = payload.decode().partition(" ")
    assert (kind, n_iterations) == (MessageKind.PROFILE, "3")
    assert Path(path).parent == tmp_path
    assert Path(path).name.startswith("stage-2-rank-0-")
    profiles.on_message(MessageKind.PROFILED, path.encode())
    assert await taking == Path(path)


async def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    profiles = profiles_in(tmp_path, OrderedRank())
    taking = asyncio.create_task(profiles.take(request()))
    await asyncio.sleep(0)
    profiles.on_message(MessageKind.NOT_PROFILED, b"no space")
    with pytest.raises(Unavailable, match="no space"):
        await taking


async def test_a_caller_who_leaves_calls_it_off(tmp_path: Path) -> None:
    rank = OrderedRank()
    profiles = profiles_in(tmp_path, rank)
    taking = asyncio.create_task(profiles.take(request()))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert rank.orders[-1] == (MessageKind.PROFILE, b"0 ")
    profiles.on_message(MessageKind.PROFILED, b"late")
    again = asyncio.create_task(profiles.take(request()))
    await asyncio.sleep(0)
    assert len(rank.orders) == 3
    again.cancel()
