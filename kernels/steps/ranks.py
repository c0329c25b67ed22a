"""Steps in which the ranks that share a stage communicate."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.steps.buffer import Buffer


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums rows over all ranks, in place."""

    x: Buffer


@dataclass(frozen=True, slots=True)
class AllGather:
    """Joins the rows of all ranks side by side, in the order of the ranks.

    Before joining, the rows of each rank are padded to `size` elements. Elements of the joined rows
    beyond the width of `out` are dropped.
    """

    x: Buffer
    size: int
    out: Buffer
