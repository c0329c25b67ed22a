"""Algorithm 1 of the Orca paper, lines 17 to 28: first come, first served, decided anew each
iteration.

A request runs its whole prompt in its first iteration and one token in each later one. A request is
admitted when all the K/V slots that it can ever need fit beside the slots already reserved. The
first request that does not fit ends the selection (`break`, not `continue`), since a later, smaller
request must not overtake it.
"""

from collections.abc import Sequence
from typing import ClassVar, Self

from services.scheduler.core.admission.prompt_groups import NO_PROMPT_GROUPS
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import PolicyOptions, Selection
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool


class OrcaPolicy:
    """The policy `orca`: iteration-level first come, first served."""

    name: ClassVar[str] = "orca"
    takes_drafts: ClassVar[bool] = False
    max_span_tokens = None
    prompt_groups = NO_PROMPT_GROUPS

    def __init__(self, *, max_batch_size: int) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        self.max_batch_size = max_batch_size

    @classmethod
    def of(cls, options: PolicyOptions) -> Self:
        """Returns the policy with the given options."""
        return cls(max_batch_size=options.max_batch_size)

    @property
    def options(self) -> PolicyOptions:
        """The options of the policy. Options that the policy does not use have defaults."""
        return PolicyOptions(self.max_batch_size)

    def select(self, pool: RequestPool, kv_manager: KVManager) -> list[Selection]:
        """Returns the next batch: lines 17 to 28 of Algorithm 1."""
        selections: list[Selection] = []
        for request in pool.candidates():
            if len(selections) == self.max_batch_size:
                break
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            selections.append(Selection(request, request.n_unscheduled, reservation))
        return selections

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the requests are numerous enough to fill a batch."""
        return len(ready) >= self.max_batch_size
