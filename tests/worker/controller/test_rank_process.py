"""A rank's process, as its controller ends it."""

import asyncio
import signal
import socket
from functools import partial
from pathlib import Path

import pytest

from services.worker.channel import MessageKind
from services.worker.controller import rank_process
from services.worker.controller.rank_process import RankProcess, connect
from services.worker.settings import WorkerSettings

LIMIT_S = 30


async def test_messages_that_must_not_wait_for_an_iteration_travel_on_the_second_channel() -> None:
    ends: list[list[MessageKind]] = [[], []]
    channels = []
    for received in ends:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        channels.append(await connect(ours, lambda *_: None, lambda: None))
        note = partial(lambda kinds, kind, _: kinds.append(kind), received)
        await connect(theirs, note, lambda: None)
    rank = RankProcess(0, None, *channels)  # type: ignore[arg-type]
    for kind in (MessageKind.PLAN, MessageKind.LEAVE, MessageKind.PREPARE_GRAMMAR):
        rank.send(kind, b"")
    async with asyncio.timeout(LIMIT_S):
        while sum(map(len, ends)) < 3:
            await asyncio.sleep(0.01)
    assert ends == [[MessageKind.PLAN], [MessageKind.LEAVE, MessageKind.PREPARE_GRAMMAR]]
    for channel in channels:
        channel.close()


class Listener:
    """Notes how the rank ended."""

    def __init__(self) -> None:
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None: ...

    def on_exit(self, tp_rank: int, status: int) -> None:
        self.exit.set_result(status)


async def test_a_busy_rank_does_not_hold_up_the_end_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_process, "STOP_TIMEOUT_S", 10 * LIMIT_S)
    listener = Listener()
    rank = await RankProcess.start(
        0,
        listener,
        settings=WorkerSettings(model=Path("m")).for_rank(0),
        module="tests.worker.controller.deaf_rank",
        n_threads=1,
    )
    async with asyncio.timeout(LIMIT_S):
        await rank.stop()
        assert await listener.exit == -signal.SIGKILL
