"""Algorithm 1 of the Orca paper, lines 17 to 28: first come, first served, decided anew each
iteration.

A request runs its whole prompt in its first iteration and one token in each later one. A request is
admitted when all the K/V slots that it can ever need fit beside the slots already reserved. The
first request that does not fit ends the selection (`break`, not `continue`), because a later,
smaller request must not overtake it.
"""

from typing import ClassVar, Self

from services.scheduler.core.policies import MemoryView, Policy, PolicyOptions, PoolView, Selection


class OrcaPolicy(Policy):
    """The policy `orca`: iteration-level first come, first served."""

    name: ClassVar[str] = "orca"

    def __init__(self, *, max_batch_size: int) -> None:
        super().__init__(PolicyOptions(max_batch_size))

    @classmethod
    def of(cls, options: PolicyOptions) -> Self:
        """Returns the policy with the given options."""
        return cls(max_batch_size=options.max_batch_size)

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the next batch: lines 17 to 28 of Algorithm 1, with `max_bs = max_batch_size`."""
        selections: list[Selection] = []
        for request in pool.candidates():
            if len(selections) == self.max_batch_size:
                break
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            selections.append(Selection(request, request.n_unscheduled, reservation))
        return selections
