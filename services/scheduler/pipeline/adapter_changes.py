"""Keeps the adapters of a pipeline as its requests need them, beside its iterations.

The gate of the pool decides what is loaded and dropped (`core/admission/adapter_gate.py`), and the
ranks carry it out (`adapter_orders.py`). Requests whose adapter cannot be loaded, or was unloaded
before they were admitted, end here.
"""

from collections.abc import Callable

from services.scheduler.core.admission.adapter_gate import UNLOADED
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.pipeline.adapter_orders import AdapterOrders

GiveUp = Callable[[Request, str], None]
"""A function that ends a waiting request, with the reason."""


class AdapterChanges:
    """The loads and drops of adapters of one pipeline."""

    def __init__(self, pool: RequestPool, orders: AdapterOrders) -> None:
        """`pool` is the pool as the pipeline sees it."""
        self._pool = pool
        self._orders = orders

    async def step(self, give_up: GiveUp) -> None:
        """Takes in what the ranks have done, and orders what they must do now.

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
        """Ends the requests that wait for an adapter which could not be loaded, if there are any,
        unless another pipeline holds or loads it."""
        for request in self._pool.shared.stranded_without(adapter) if adapter else ():
            give_up(request, f"model: its adapter cannot be loaded: {failure}")


class NoAdapterChanges:
    """Replacement for `AdapterChanges` where no adapters are loaded."""

    async def step(self, give_up: GiveUp) -> None:
        """Does nothing."""


NO_ADAPTER_CHANGES = NoAdapterChanges()
