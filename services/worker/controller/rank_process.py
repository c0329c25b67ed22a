"""A rank as the controller sees it: a child process, and two channels to that process.

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
from services.worker.channel import URGENT, ControllerEnd, MessageKind
from services.worker.settings import FreeRankSettings, PipelinePlace, WorkerSettings

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Timeout in seconds for a rank to end after it was killed."""

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
        """Queues a frame for the rank. Never waits."""


class RankListener(Protocol):
    """An object whose methods are called with the messages of a rank and when the rank ends."""

    def on_message(self, tp_rank: int, kind: MessageKind, payload: bytes) -> None:
        """Called for each message (frame) of the rank."""

    def on_exit(self, tp_rank: int, status: int) -> None:
        """Called when the rank's process has ended. `status` is its exit status, or the negative
        number of the signal that ended it."""


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
        settings: FreeRankSettings,
        module: str,
        n_threads: int,
        cpus: Sequence[int] = (),
    ) -> "RankProcess":
        """Starts `python -m module` for a rank and connects to the process.

        The rank waits for a message with its stage (`MessageKind.PLACE`) before it loads its
        weights. If `cpus` are given, each compute thread of the rank has one CPU to itself.
        """
        pairs = [socket.socketpair() for _ in range(2)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *(str(theirs.fileno()) for _, theirs in pairs),
            settings.model_dump_json(),
            pass_fds=[theirs.fileno() for _, theirs in pairs],
            stdin=asyncio.subprocess.DEVNULL,
            env=_environment(n_threads, cpus),
        )
        exited = asyncio.create_task(process.wait())

        def on_closed() -> None:
            exited.add_done_callback(lambda task: listener.on_exit(tp_rank, task.result()))

        def on_message(kind: MessageKind, payload: bytes) -> None:
            listener.on_message(tp_rank, kind, payload)

        ends = []
        for (ours, theirs), when_closed in zip(pairs, (on_closed, _ignore), strict=True):
            theirs.close()
            ends.append(await connect(ours, on_message, when_closed))
        return cls(tp_rank, process, *ends)

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Queues a frame for the rank, on the channel for frames of this kind. Never waits."""
        channel = self._lifeline if kind in URGENT else self._channel
        channel.send(kind, payload)

    def kill(self) -> None:
        """Kills the rank, even if its process is stopped by a signal. Does not wait until the
        process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Kills the rank and waits up to STOP_TIMEOUT_S seconds for its process to end.

        A rank has nothing to finish, because its requests belong to the scheduler. It is killed,
        because it could otherwise go on for a long time with an iteration or with loading weights.
        """
        self._channel.close()
        self._lifeline.close()
        self.kill()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:  # the process is in a system call, and ends when the call returns
            log.error("rank %d does not end although it was killed", self.tp_rank)


async def start_ranks(
    settings: WorkerSettings, listener: RankListener, *, module: str
) -> list[RankProcess]:
    """Starts `python -m module` for each rank of a stage. Returns the ranks in order of tp_rank.

    Each rank first reports its traits. It loads its weights after `place_ranks` has sent it the
    stage to which it belongs.
    """
    n_threads = settings.n_threads or max(1, usable_cpus() // settings.tp_size)
    return [
        await RankProcess.start(
            tp_rank,
            listener,
            settings=settings.for_rank(tp_rank),
            module=module,
            n_threads=n_threads,
            cpus=settings.cpus_of(tp_rank),
        )
        for tp_rank in range(settings.tp_size)
    ]


def place_ranks(place: PipelinePlace, ranks: Sequence[RankLink]) -> None:
    """Sends the ranks the stage to which they belong. The ranks then load the weights of this
    stage."""
    for rank in ranks:
        rank.send(MessageKind.PLACE, place.to_bytes())


async def connect(
    ours: socket.socket,
    on_message: Callable[[MessageKind, bytes], None],
    on_closed: Callable[[], None],
) -> ControllerEnd:
    """Adds the connected socket `ours`, the controller's end of a socket pair, to the event loop,
    and returns that end. `on_message` is called for each message (frame), and `on_closed` when the
    rank has closed its end."""
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
