"""Layouts: into how many stages and ranks a model is divided, and how many threads a rank has."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """A division of a model among ranks. Only a restart of the workers can change it."""

    stages: int
    tp: int
    threads: int
    """Number of threads of each rank."""

    def __str__(self) -> str:
        is_several = self.stages * self.tp > 1
        parts = [_counted(self.stages, "stage")]
        if self.tp > 1:
            parts.append(f"of {self.tp} ranks")
        return " ".join([*parts, f"with {_counted(self.threads, 'thread')}" + " each" * is_several])


def layouts(n_cpus: int, *, max_ranks: int, n_layers: int, n_kv_heads: int) -> Sequence[Layout]:
    """Returns the layouts to try, beginning with the layouts that probably serve best. Every rank
    has the same number of threads, and the ranks together use all CPUs, except CPUs that an equal
    division leaves over.

    One further layout has a single rank and leaves one CPU to the frontend and the scheduler. The
    number of K/V heads must be divisible by the number of ranks of a stage.
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
