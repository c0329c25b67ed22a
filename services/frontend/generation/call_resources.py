"""The resources of this process that one call holds while it runs."""

import asyncio
from dataclasses import dataclass, field

from orcinus.v1 import scheduler_pb2

from services.frontend.request.answers_in_flight import AnswersInFlight
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResources:
    """The resources of this process that one call holds while it runs."""

    in_flight: AnswersInFlight
    """Answers of this call that the scheduler still runs. An answer that is complete, but not yet
    read by its client, does not count."""
    share: Share
    """Share of the memory budget that the call holds until it ends. The share grows when output is
    kept in memory."""
    budget: MemoryBudget
    """Memory budget for output that the client has not read."""
    refusals: Refusals = field(default_factory=Refusals)
    replaying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that a call holds while it replays tokens, so that only one call of the process replays
    tokens at a time."""
    max_at_once: int = 32
    """Largest number of answers of the call that the scheduler has at a time."""
    account: scheduler_pb2.Account | None = None
    """Account to which the scheduler charges the call, or None if the caller has no API key."""

    def keep(self, n_bytes: int) -> None:
        """Takes `n_bytes` of the memory budget for output that is kept. A negative number gives
        bytes back; the end of the call gives back the rest. Raises PoolFull if the budget has too
        little memory left. Has no effect after the end of the call, because a thread may still be
        writing an answer at that time."""
        if n_bytes < 0:
            self.share.shrink(-n_bytes)
        else:
            self.share.grow(n_bytes)
