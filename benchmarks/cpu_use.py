"""The use of the processors during a measurement, by the engine and by all other processes.

Two engines can be compared only if no other process took processor time from one of them. OpenMP's
threads wait for each other, so a run beside one busy process can take several times as long. So the
record of every run has two mean numbers of busy cores: the cores that the engine used, and the
cores that all other processes used.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator

import psutil

QUIET_CPUS = 0.1
"""Mean number of cores that other processes may use before a run counts as disturbed."""


class CpuUse:
    """Two mean numbers of cores that were busy during a measurement: those used by the engine, and
    those used by all other processes. Both numbers are 0 until the measurement ends."""

    own_cpus: float = 0.0
    other_cpus: float = 0.0
    """Mean number of cores that all other processes used. Includes the time in which the hypervisor
    ran other virtual machines (steal time)."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes used too much processor time for a comparison."""
        return self.other_cpus > QUIET_CPUS


Watch = contextlib.AbstractContextManager[CpuUse]


@contextlib.contextmanager
def watch(engine: int | None = None) -> Iterator[CpuUse]:
    """Counts processor time inside the context. The yielded `CpuUse` gets its numbers when the
    context ends.

    Args:
        engine: id of the measured process. This process, that process and the descendants of that
            process count as the engine. If None, this process and all its descendants count as the
            engine. A process that ends within the context counts among the others.
    """
    use = CpuUse()
    here = psutil.Process()
    root = here if engine is None else psutil.Process(engine)
    own_s, busy_s, start = _used_s({here, *family(root)}), _busy_s(), time.perf_counter()
    yield use
    elapsed_s, busy_s = time.perf_counter() - start, _busy_s() - busy_s
    after_s = _used_s({here, *family(root)})
    used_s = sum(used - own_s.get(process, 0.0) for process, used in after_s.items())
    use.own_cpus = used_s / elapsed_s
    use.other_cpus = max(0.0, busy_s - used_s) / elapsed_s


def family(root: psutil.Process) -> set[psutil.Process]:
    """Returns a process and all its descendants; an empty set if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {root, *root.children(recursive=True)}
    return set()


def _used_s(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    used = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process] = float(times.user + times.system)
    return used


def _busy_s() -> float:
    times = psutil.cpu_times()
    # Guests' time is in user time already.
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
