"""A processor of its own for the engine, as its pod has, where all run on one machine."""

import contextlib
import os
from collections.abc import Iterator

import psutil

RANK_MODULE = "services.worker.rank"


@contextlib.contextmanager
def ranks_apart() -> Iterator[None]:
    """Gives the ranks among this process's descendants the last processor, and all others of them,
    and the process itself, the rest; does nothing where there is only one processor. Processes and
    threads that come later inherit their parent's. Afterwards this process has all of them again,
    for a system that it starts then."""
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
