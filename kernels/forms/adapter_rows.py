"""The rows of a batch, grouped by the adapters that they use (`kernels.steps.AddLowRank`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

NO_ADAPTER = -1
"""Index that means that a row has no adapter."""


class AdapterRows:
    """The rows of some tokens, grouped by the adapter that each token uses.

    The rows of one adapter are in ascending order, so that rows that are read one after the other
    are close together in memory.
    """

    __slots__ = ("_on_device", "adapters", "begins", "rows")

    def __init__(self, adapters: Ints, n_adapters: int) -> None:
        """`adapters` [n] has the index of each row's adapter, below `n_adapters`, or NO_ADAPTER."""
        self.adapters = adapters
        order = np.argsort(adapters, kind="stable")
        n_without = int(np.count_nonzero(adapters == NO_ADAPTER))
        self.rows: Ints = np.ascontiguousarray(order[n_without:], dtype=np.int64)
        """Indices of all rows with an adapter: the rows of adapter 0, then the rows of adapter 1,
        and so on."""
        self.begins: Ints = np.searchsorted(
            adapters[order], np.arange(n_adapters + 1), side="left"
        ).astype(np.int64)
        self.begins -= n_without
        """The index in `rows` at which the rows of each adapter begin, followed by the length of
        `rows`, [n_adapters + 1]."""
        self._on_device: dict[int, Tensor] = {}

    @property
    def n_adapters(self) -> int:
        """Number of adapters, including adapters without a row."""
        return len(self.begins) - 1

    def at(self, places: Ints) -> AdapterRows:
        """Returns the rows with the indices `places`, grouped anew. Row i of the result is the row
        `places[i]` of this object."""
        return AdapterRows(self.adapters[places], self.n_adapters)

    def of(self, adapter: int, device: torch.device) -> Tensor:
        """Returns the indices of the rows of an adapter as a tensor on `device`, [n] int64. All
        calls must use the same device."""
        if adapter not in self._on_device:
            rows = self.rows[self.begins[adapter] : self.begins[adapter + 1]]
            self._on_device[adapter] = torch.from_numpy(rows).to(device)
        return self._on_device[adapter]


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """The rows of a batch's tokens, and the rows of its sampled tokens, both grouped by adapter."""

    tokens: AdapterRows
    sampled: AdapterRows

    @classmethod
    def of(cls, adapters: Ints, sampled: Ints, n_adapters: int) -> BatchAdapters | None:
        """Groups the rows of a batch. Returns None if no token has an adapter.

        `adapters` [n_tokens] has the index of each token's adapter, or NO_ADAPTER. `sampled`
        [n_sampled] are the indices of the sampled tokens.
        """
        if (adapters == NO_ADAPTER).all():
            return None
        tokens = AdapterRows(adapters, n_adapters)
        return cls(tokens, tokens.at(sampled))
