"""A rank as its controller sees it: a child process and the two channels to it.

The child is a fresh interpreter, never a fork, so that no gRPC thread is ever copied into it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.cpus import usable_cpus
from services.worker.channel import ControllerEnd, MessageKind
from services.worker.settings import NO_SETTINGS, PipelinePlace, RankSettings, WorkerSettings

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Time for a rank to end by itself before it is killed, and to end when it has been."""

MEMORY_ENVIRONMENT = {
    # Large pages for large tensors, where the system gives them on request: weights and K/V
    # are then read up to a fifth faster.
    "THP_MEM_ALLOC_ENABLE": "1",
    # glibc keeps up to this many bytes that were freed, for tensors up to that many. Otherwise the
    # logits of a batch, which sampling copies, are new pages in each iteration: their first touch
    # takes ten times as long as the copy.
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
"""Variables for a rank that say how it gets its memory; variables that are set already win."""


class RankLink(Protocol):
    """A rank as far as frames can be sent to it."""

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Queues a frame for the rank; never waits."""


class RankListener(Protocol):
    """The receiver of what a rank sends."""

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """Takes a frame that the rank sent."""

    def on_exit(self, tp_rank: int, reason: str) -> None:
        """Hears that the rank is gone, or about to go."""


class RankProcess:
    """A running rank and the two channels to it."""

    def __init__(
        self,
        tp_rank: int,
        process: asyncio.subprocess.Process,
        channel: ControllerEnd,
        lifeline: ControllerEnd,
    ) -> None:
        self.tp_rank = tp_rank
        self._process = process
        self._channel = channel
        self._lifeline = lifeline

    @classmethod
    async def start(
        cls,
        tp_rank: int,
        listener: RankListener,
        *,
        settings: RankSettings | None,
        module: str,
        n_threads: int,
        cpus: Sequence[int] = (),
    ) -> "RankProcess":
        """Starts `python -m module` for a rank and connects to it. Without settings it waits for
        them (`MessageKind.SETTINGS`).

        If there are `cpus`, each of its compute threads has one of them to itself.
        """
        pairs = [socket.socketpair() for _ in range(2)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *(str(theirs.fileno()) for _, theirs in pairs),
            NO_SETTINGS if settings is None else settings.model_dump_json(),
            pass_fds=[theirs.fileno() for _, theirs in pairs],
            stdin=asyncio.subprocess.DEVNULL,
            env=_environment(n_threads, cpus),
        )
        exited = asyncio.create_task(process.wait())

        def on_closed() -> None:
            exited.add_done_callback(
                lambda task: listener.on_exit(tp_rank, f"exited with status {task.result()}")
            )

        def on_message(kind: MessageKind, payload: bytes) -> None:
            listener.on_message(tp_rank, kind, payload)

        ends = []
        for (ours, theirs), when_closed in zip(pairs, (on_closed, _ignore), strict=True):
            theirs.close()
            ends.append(await connect(ours, on_message, when_closed))
        return cls(tp_rank, process, *ends)

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Queues a frame for the rank, on the channel for its kind; never waits."""
        channel = self._lifeline if kind is MessageKind.LEAVE else self._channel
        channel.send(kind, payload)

    def kill(self) -> None:
        """Ends the rank at once, also one that is stopped; does not wait."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Lets the rank end by itself, and kills it after STOP_TIMEOUT_S."""
        self._channel.close()
        self._lifeline.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        self.kill()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except (
            TimeoutError
        ):  # the process is inside the kernel, and ends when it returns from there
            log.error("rank %d does not end although it was killed", self.tp_rank)


async def start_ranks(
    settings: WorkerSettings, listener: RankListener, *, module: str
) -> list[RankProcess]:
    """Starts `python -m module` for every rank of a stage, in the order of their tp_rank. Without a
    place in the settings they wait until `settle_ranks` tells them theirs."""
    place = settings.place
    n_threads = settings.n_threads or max(1, usable_cpus() // settings.tp_size)
    return [
        await RankProcess.start(
            tp_rank,
            listener,
            settings=None if place is None else settings.for_rank(tp_rank, place),
            module=module,
            n_threads=n_threads,
            cpus=settings.cpus_of(tp_rank),
        )
        for tp_rank in range(settings.tp_size)
    ]


def settle_ranks(settings: WorkerSettings, place: PipelinePlace, ranks: Sequence[RankLink]) -> None:
    """Tells ranks which stage they are, if they do not know it by their worker's settings."""
    if settings.place is None:
        for tp_rank, rank in enumerate(ranks):
            own = settings.for_rank(tp_rank, place)
            rank.send(MessageKind.SETTINGS, own.model_dump_json().encode())


async def connect(
    ours: socket.socket,
    on_message: Callable[[MessageKind, bytes], None],
    on_closed: Callable[[], None],
) -> ControllerEnd:
    """Returns the controller's end of a socket pair, which calls back."""
    _, end = await asyncio.get_running_loop().create_connection(
        lambda: ControllerEnd(on_message, on_closed), sock=ours
    )
    return end


def _ignore() -> None:
    pass


def _environment(n_threads: int, cpus: Sequence[int]) -> dict[str, str]:
    environment = {**MEMORY_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(n_threads)}
    if cpus:
        environment["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in cpus)
        environment["OMP_PROC_BIND"] = "true"
    return environment
