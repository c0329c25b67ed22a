"""Layouts: how a model is cut into stages and ranks, and the threads of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to divide a model over ranks, which only a restart of the workers changes."""

    stages: int
    tp: int
    threads: int
    """Of each rank."""

    def __str__(self) -> str:
        is_several = self.stages * self.tp > 1
        parts = [_counted(self.stages, "stage")]
        if self.tp > 1:
            parts.append(f"of {self.tp} ranks")
        return " ".join([*parts, f"with {_counted(self.threads, 'thread')}" + " each" * is_several])


def layouts(n_cpus: int, *, max_ranks: int, n_layers: int, n_kv_heads: int) -> Sequence[Layout]:
    """Returns the layouts to try, those that are most likely the best first.

    Every rank has the same number of threads, and all together use all CPUs, or one less where one
    rank has more than one: that one is then the frontend's and the scheduler's. Heads must be
    divisible among the ranks of a stage.
    """
    found = [Layout(1, 1, n_cpus)]
    n_ranks = 2
    while n_ranks <= min(max_ranks, n_cpus):
        tp = 1
        while tp <= n_ranks:
            stages = n_ranks // tp
            if stages <= n_layers and n_kv_heads % tp == 0:
                found.append(Layout(stages, tp, n_cpus // n_ranks))
            tp *= 2
        n_ranks *= 2
    if n_cpus > 1:
        found.append(Layout(1, 1, n_cpus - 1))
    return found[:MAX_LAYOUTS]


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s'[: n > 1]}"
