"""A step that adds the products of low-rank adapters (LoRA) to the result of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.steps.buffer import Buffer
from kernels.weights.linear import LinearWeight


@dataclass(frozen=True, slots=True)
class LowRank:
    """The two matrices of an adapter for one linear layer. They change some neighbouring outputs of
    the layer."""

    adapter: int  # the index of the adapter among all adapters of the program
    first: int  # the first output that changes
    down: LinearWeight  # [rank, n_in]
    up: LinearWeight  # [n_changed, rank], with the adapter's scale


@dataclass(frozen=True, slots=True)
class AddLowRank:
    """Adds `up @ (down @ x)` to a part of each row of `out`, in place. The matrices `up` and `down`
    belong to the row's adapter.

    The batch has the adapter of each row (`kernels.forms.adapter_rows`). Rows of one adapter are
    multiplied together, and the sums of a row do not depend on the other rows. Rows without an
    adapter, and rows of adapters that are not in `each`, stay as they are.
    """

    x: Buffer
    each: Sequence[LowRank]
    gathered: Buffer  # scratch memory for the inputs of the rows of one adapter
    inner: Buffer  # scratch memory for their products with `down`, as wide as the largest rank
    outer: Buffer  # scratch memory for parts of the rows of `out`
    out: Buffer
