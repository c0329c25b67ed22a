"""BatchMaker's cellular batching (Gao et al., "Low Latency RNN Inference with Cellular Batching",
EuroSys'18), applied to Transformers.

BatchMaker lets requests join and leave a batch between cells of a recurrent network, and batches
cells that have equal weights. In a Transformer the cells of two requests are alike only at equal
positions, because the length of attention depends on the position (Orca, section 7). So all
requests of an iteration have equal numbers of stored tokens and of tokens to store.
"""

from typing import ClassVar

from services.scheduler.core.policies import MemoryView, Policy, PoolView, Selection


class BatchMakerPolicy(Policy):
    """The policy `batchmaker`: a batch has the first request in the pool's order, and all requests
    with equal numbers of stored tokens and of tokens to store."""

    name: ClassVar[str] = "batchmaker"
    keeps_order: ClassVar[bool] = False

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the first request that can run, and the requests at the same position."""
        selections: list[Selection] = []
        position: tuple[int, int] | None = None
        for request in pool.candidates():
            if len(selections) == self.max_batch_size:
                break
            own = request.n_scheduled, request.n_unscheduled
            if position is not None and own != position:
                if request.reservation is None and position[0]:
                    break  # no request that waits is at the position of a decode
                continue
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            position = own
            selections.append(Selection(request, request.n_unscheduled, reservation))
        return selections
