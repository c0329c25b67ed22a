"""Steps at which the ranks that share a stage meet."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.steps.buffer import Buffer


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums rows over all ranks, in place."""

    x: Buffer


@dataclass(frozen=True, slots=True)
class AllGather:
    """Puts the rows of all ranks side by side, in the order of the ranks.

    The rows of each rank are filled up to `size` elements first. What is beyond the width of `out`
    is left out.
    """

    x: Buffer
    size: int
    out: Buffer
