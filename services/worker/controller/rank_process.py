"""A rank from the controller's side: a child process and two channels to the process.

The child process is a new interpreter, not a fork, because a fork would copy gRPC's state without
its threads.
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
"""Timeout for a rank to end by itself before it is killed, and to end after that, in seconds."""

MEMORY_ENVIRONMENT = {
    # Large pages for large tensors, if the system gives them on request. Weights and K/V are then
    # read up to a fifth faster.
    "THP_MEM_ALLOC_ENABLE": "1",
    # glibc keeps up to 128 MiB of freed memory, from allocations of up to 32 MiB. Otherwise the
    # copy of a batch's logits for sampling would need new pages in each iteration, and touching new
    # pages takes ten times as long as the copy.
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
"""Environment variables of a rank for the allocation of memory. A variable that is already set is
not changed."""


class RankLink(Protocol):
    """A connection by which frames are sent to a rank."""

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Queues a frame for the rank; never waits."""


class RankListener(Protocol):
    """An object that is called for the messages of ranks."""

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """Called for each frame that the rank sends."""

    def on_exit(self, tp_rank: int, reason: str) -> None:
        """Called when the rank has ended or is about to end."""


class RankProcess:
    """The process of a rank and the two channels to the process."""

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
        """Starts `python -m module` for a rank and connects to the process.

        If `settings` is None, the rank waits for a message with its settings
        (`MessageKind.SETTINGS`). If `cpus` are given, each compute thread of the rank has one CPU
        to itself.
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
        """Kills the rank, also if its process is stopped; does not wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Waits for the rank to end by itself, and kills it after STOP_TIMEOUT_S."""
        self._channel.close()
        self._lifeline.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        self.kill()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:  # the process is in a system call, and ends when the call returns
            log.error("rank %d does not end although it was killed", self.tp_rank)


async def start_ranks(
    settings: WorkerSettings, listener: RankListener, *, module: str
) -> list[RankProcess]:
    """Starts `python -m module` for each rank of a stage; returns the ranks in order of tp_rank.

    If the settings do not name a stage, the ranks wait for `settle_ranks`.
    """
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
    """Sends ranks their settings with the stage `place`, if the worker's settings name no stage."""
    if settings.place is None:
        for tp_rank, rank in enumerate(ranks):
            own = settings.for_rank(tp_rank, place)
            rank.send(MessageKind.SETTINGS, own.model_dump_json().encode())


async def connect(
    ours: socket.socket,
    on_message: Callable[[MessageKind, bytes], None],
    on_closed: Callable[[], None],
) -> ControllerEnd:
    """Returns the controller's end of a socket pair, which calls `on_message` for each frame and
    `on_closed` at the end."""
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
