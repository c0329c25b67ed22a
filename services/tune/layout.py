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
    """Returns at most `MAX_LAYOUTS` layouts to try, beginning with those that probably serve best.
    All ranks of a layout have the same number of threads. Together they use all CPUs, except for
    the remainder if the number of CPUs cannot be divided by the number of ranks.

    If there are several CPUs, the last layout has a single rank and leaves one CPU to the frontend
    and the scheduler. A layout is left out if it has more stages than the model has
    layers, or if the number of K/V heads is not divisible by the number of ranks of a stage.
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
    last = [Layout(1, 1, n_cpus - 1)] if n_cpus > 1 else []
    return [*found[: MAX_LAYOUTS - len(last)], *last]


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s'[: n > 1]}"
