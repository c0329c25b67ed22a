"""The adapters that a rank loads in one epoch, as the scheduler orders.

Orders and plans are carried out in the order in which they arrive: an order waits until the plans
before it have been started. A loaded adapter is added between two iterations, so no iteration uses
only a part of it. A new epoch begins with the adapters that the settings name, and the scheduler
orders the others again.
"""

from __future__ import annotations

import queue
from collections.abc import Collection
from typing import Protocol

from orcinus.v1 import worker_pb2

from services.worker.models.adapters.adaptable_program import FittedAdapter
from services.worker.rank.adapter_loader import AdapterLoader, LoadEnd, NoLoader


class AdaptedRunner(Protocol):
    """The methods of a model runner that add and drop adapters."""

    def add_adapter(self, fitted: FittedAdapter) -> None:
        """Adds an adapter. Batches that are prepared later may use the adapter."""

    def drop_adapter(self, digest: str) -> None:
        """Drops an adapter that was added."""


class NoRunner:
    """Replacement for a model runner where no adapters are loaded."""

    def add_adapter(self, fitted: FittedAdapter) -> None:
        """Does nothing: this rank loads no adapters."""

    def drop_adapter(self, digest: str) -> None:
        """Does nothing: this rank loads no adapters."""


NO_RUNNER = NoRunner()


class EpochAdapters:
    """Loads and drops adapters on one rank during one epoch, in addition to the adapters that the
    settings name."""

    def __init__(
        self, loader: AdapterLoader | NoLoader, runner: AdaptedRunner, fixed: Collection[str] = ()
    ) -> None:
        """`fixed` are the digests of the adapters that the settings name. They have the first
        indices."""
        self._loader = loader
        self._runner = runner
        self._fixed = frozenset(fixed)
        self._n_fixed = len(fixed)
        self._indices: dict[int, int] = {}  # of loaded and loading adapters, by load id
        self._loaded: dict[int, str] = {}  # digests of loaded adapters, by load id
        self._ended: queue.SimpleQueue[LoadEnd] = queue.SimpleQueue()
        self._reports: list[worker_pb2.AdapterReport] = []

    @property
    def is_loading(self) -> bool:
        """Whether there is a load whose report `take_reports` has not returned yet."""
        return bool(self._reports) or len(self._indices) > len(self._loaded)

    def obey(self, order: worker_pb2.AdapterOrder) -> None:
        """Carries out an order: drops the adapters in `order.dropped`, and then begins to load an
        adapter if the order has a `load_id`."""
        for load_id in order.dropped:
            self._indices.pop(load_id, None)
            digest = self._loaded.pop(load_id, "")
            if digest and digest not in self._loaded.values():
                self._runner.drop_adapter(digest)
        if not order.load_id:
            return
        if len(self._indices) >= self._loader.max_loaded:
            self._report(order.load_id, failure="the workers load no more adapters")
            return
        used = set(self._indices.values())
        index = next(i for i in range(self._n_fixed, 2**16) if i not in used)
        self._indices[order.load_id] = index
        self._loader.begin(order, index, self._ended.put)

    def take_reports(self) -> list[worker_pb2.AdapterReport]:
        """Adds to the model runner the adapters that have been loaded since the last call. Returns
        the reports of the loads that have ended since then. Loads whose adapters were dropped
        meanwhile are left out."""
        while not self._ended.empty():
            end = self._ended.get()
            if end.load_id not in self._indices:
                continue
            if end.fitted is None:
                del self._indices[end.load_id]
                self._report(end.load_id, failure=end.failure)
            else:
                self._add(end.load_id, end.fitted)
        reports, self._reports = self._reports, []
        return reports

    def _add(self, load_id: int, fitted: FittedAdapter) -> None:
        """Adds the adapter of a load to the model runner, unless the rank already has an adapter
        with the same digest. That adapter then serves both loads, and stays until both are dropped.

        Ranks end a load at different times. So an order that drops the earlier load may reach one
        rank before the later load has ended there, and another rank after that."""
        equal = next((one for one, digest in self._loaded.items() if digest == fitted.digest), 0)
        if fitted.digest in self._fixed:
            del self._indices[load_id]
        else:
            self._loaded[load_id] = fitted.digest
            if equal:
                self._indices[load_id] = self._indices[equal]
            else:
                self._runner.add_adapter(fitted)
        self._report(load_id, digest=fitted.digest)

    def _report(self, load_id: int, *, digest: str = "", failure: str = "") -> None:
        self._reports.append(
            worker_pb2.AdapterReport(load_id=load_id, digest=digest, failure=failure)
        )
