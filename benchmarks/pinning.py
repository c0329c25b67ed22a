"""A processor of its own for the engine, as its pod has, where all run on one machine."""

import os

import psutil

RANK_MODULE = "services.worker.rank"


def pin_ranks(root: psutil.Process) -> None:
    """Gives the ranks among a process's descendants the last processor, and all others of them,
    and the process itself, the rest; does nothing where there is only one processor. Processes and
    threads that come later inherit their parent's."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return
    for process in (root, *root.children(recursive=True)):
        is_rank = RANK_MODULE in process.cmdline()
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cpus[-1:] if is_rank else cpus[:-1])
