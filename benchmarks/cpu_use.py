"""The use of the processors during a measurement, by the engine and by everybody else.

Two engines can be compared only if nothing else took processor time from one of them: OpenMP's
threads wait for each other, so a run beside one busy process can take several times as long. So
every run is stamped with the mean number of cores that it used, and that all others used.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator

import psutil

QUIET_CPUS = 0.1
"""Cores that others may use on average before a run counts as disturbed."""


class CpuUse:
    """Mean number of cores that were busy, once it is known."""

    own_cpus: float = 0.0
    other_cpus: float = 0.0
    """Cores that everybody else used, with what the hypervisor gave to others."""

    @property
    def is_disturbed(self) -> bool:
        """Whether others used more than a comparison bears."""
        return self.other_cpus > QUIET_CPUS


Watch = contextlib.AbstractContextManager[CpuUse]


@contextlib.contextmanager
def watch(engine: int | None = None) -> Iterator[CpuUse]:
    """Counts processor time until the context ends; only then there is an answer.

    Args:
        engine: the process of what is measured. It, its descendants and this process are what
            counts as own. Without it, this process and all its descendants. One that ends within
            the context counts among the others.
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
    """Returns a process and all its descendants; nothing when it has ended."""
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
