"""A rank's process, as its controller ends it."""

import asyncio
from pathlib import Path

import pytest

from services.worker.channel import MessageKind
from services.worker.controller import rank_process
from services.worker.controller.rank_process import RankProcess
from services.worker.settings import WorkerSettings

LIMIT_S = 30


class Listener:
    """Notes how the rank ended."""

    def __init__(self) -> None:
        self.exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None: ...

    def on_exit(self, tp_rank: int, reason: str) -> None:
        self.exit.set_result(reason)


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
        assert await listener.exit == "exited with status -9"
