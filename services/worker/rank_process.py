"""A rank as its controller sees it: a child process and the channel to it.

The child is a fresh interpreter, never a fork, so that no gRPC thread is ever copied into it.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Protocol

from services.worker.channel import ControllerEnd, MessageKind
from services.worker.settings import RankSettings

STOP_TIMEOUT_S = 5.0


class RankListener(Protocol):
    """Who wants to know what a rank says."""

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """The rank sent a frame."""

    def on_exit(self, tp_rank: int, reason: str) -> None:
        """The rank is gone, or about to go."""


class RankProcess:
    """A running rank."""

    def __init__(
        self, tp_rank: int, process: asyncio.subprocess.Process, channel: ControllerEnd
    ) -> None:
        self.tp_rank = tp_rank
        self.send: Callable[[MessageKind, bytes], None] = channel.send
        self._process = process
        self._channel = channel

    @classmethod
    async def start(
        cls, settings: RankSettings, listener: RankListener, *, module: str, n_threads: int
    ) -> "RankProcess":
        """Starts `python -m module` for a rank and connects to it."""
        ours, theirs = socket.socketpair()
        tp_rank = settings.tp_rank
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                settings.model_dump_json(),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=_environment(n_threads),
            )
        exited = asyncio.create_task(process.wait())

        def on_closed() -> None:
            exited.add_done_callback(
                lambda task: listener.on_exit(tp_rank, f"exited with status {task.result()}")
            )

        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: ControllerEnd(
                lambda kind, payload: listener.on_message(tp_rank, kind, payload), on_closed
            ),
            sock=ours,
        )
        return cls(tp_rank, process, channel)

    async def stop(self) -> None:
        """Ends the rank, by force if it does not end by itself."""
        self._channel.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _environment(n_threads: int) -> dict[str, str]:
    environment = dict(os.environ)
    if n_threads:
        environment["OMP_NUM_THREADS"] = str(n_threads)
    return environment
