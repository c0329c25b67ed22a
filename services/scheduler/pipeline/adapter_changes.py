"""Loads and drops the adapters of a pipeline, while its iterations go on.

The adapter gate of the pool decides what is loaded and dropped (`core/admission/adapter_gate.py`),
and the ranks carry out its decisions (`adapter_orders.py`). This module ends the waiting requests
whose adapter cannot be loaded, or was unloaded before they were admitted.
"""

from collections.abc import Callable

from services.scheduler.core.admission.adapter_gate import UNLOADED
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.pipeline.adapter_orders import AdapterOrders

GiveUp = Callable[[Request, str], None]
"""A function that ends a waiting request. Its second argument is the reason, for the client."""


class AdapterChanges:
    """Loads and drops the adapters of one pipeline, as the pool's adapter gate decides."""

    def __init__(self, pool: RequestPool, orders: AdapterOrders) -> None:
        """`pool` is the pipeline's own `RequestPool`. `orders` makes the ranks load and drop."""
        self._pool = pool
        self._orders = orders

    async def step(self, give_up: GiveUp) -> None:
        """Notes the loads that have ended on the ranks, and orders the next load or drop. Calls
        `give_up` with each waiting request whose adapter will never be loaded.

        Raises:
            PipelineLost: the epoch is over.
        """
        gate = self._pool.adapters
        for load_id, digest, failure in self._orders.take():
            if failure:
                self._fail(gate.note_failed(load_id, failure), failure, give_up)
            else:
                gate.note_loaded(load_id, digest)
        if self._pool.is_late or not gate.is_needed:
            return
        for request in gate.strays(self._pool.order):
            give_up(request, UNLOADED)
        if (change := gate.next_change(self._pool.line())) is not None:
            await self._orders.order(change)

    def _fail(self, adapter: str, failure: str, give_up: GiveUp) -> None:
        """Ends the requests that wait for the adapter with the digest `adapter`, which could not be
        loaded, unless another pipeline holds or loads it. Does nothing if `adapter` is empty."""
        for request in self._pool.shared.stranded_without(adapter) if adapter else ():
            give_up(request, f"model: its adapter cannot be loaded: {failure}")


class NoAdapterChanges:
    """Replacement for `AdapterChanges` where no adapters are loaded."""

    async def step(self, give_up: GiveUp) -> None:
        """Does nothing: no adapters are loaded."""


NO_ADAPTER_CHANGES = NoAdapterChanges()
