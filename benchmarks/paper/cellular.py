"""Cellular batching (BatchMaker, Gao et al., EuroSys'18), applied to Transformers.

BatchMaker lets requests join and leave a batch between cells of a recurrent network, and batches
cells that have equal weights. In a Transformer the cells of two requests are alike only at equal
positions, because the length of attention depends on the position (Orca, section 7). So all
requests of an iteration have equal numbers of stored tokens and of tokens to store.
"""

from collections.abc import Sequence

from services.scheduler.core.admission.prompt_groups import NO_PROMPT_GROUPS
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Selection
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool


class CellularPolicy:
    """A policy that selects the first request in the pool's order, and all requests at the position
    of this request."""

    name = "cellular"
    max_span_tokens = None
    prompt_groups = NO_PROMPT_GROUPS

    def __init__(self, *, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size

    def select(self, pool: RequestPool, kv_manager: KVManager) -> list[Selection]:
        """Returns the requests at the position of the first request that can run."""
        selections: list[Selection] = []
        position: tuple[int, int] | None = None
        for request in pool.candidates():
            if len(selections) == self.max_batch_size:
                break
            own = request.n_scheduled, request.n_unscheduled
            if position is not None and own != position:
                continue
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            position = own
            selections.append(Selection(request, request.n_unscheduled, reservation))
        return selections

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the ready requests fill a batch."""
        return len(ready) >= self.max_batch_size
