"""Gives the ranks a processor of their own on a machine that they share with all other processes,
as a pod would."""

import contextlib
import os
from collections.abc import Iterator

import psutil

RANK_MODULE = "services.worker.rank"


@contextlib.contextmanager
def ranks_apart() -> Iterator[None]:
    """Inside the context, the ranks among this process's descendants run on the last processor. All
    other descendants, and this process, run on the other processors.

    At the end of the context, this process runs on all processors again. New processes and threads
    inherit their parent's processors. If there is only one processor, nothing changes.
    """
    own = psutil.Process()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        yield
        return
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            is_rank = RANK_MODULE in process.cmdline()
            _pin(process, cpus[-1:] if is_rank else cpus[:-1])
    _pin(own, cpus[:-1])
    try:
        yield
    finally:
        _pin(own, cpus)


def _pin(process: psutil.Process, cpus: list[int]) -> None:
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):  # so has the thread
            os.sched_setaffinity(thread.id, cpus)
