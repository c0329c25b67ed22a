"""What one call holds of this process while it runs."""

import asyncio
from dataclasses import dataclass, field

from orcinus.v1 import scheduler_pb2

from services.frontend.request.answers_in_flight import AnswersInFlight
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResources:
    """What one call holds of this process while it runs."""

    in_flight: AnswersInFlight
    """Answers of this call that the scheduler still runs. A client that reads slowly does not
    count: its answers are complete."""
    share: Share
    """Share of the memory budget that the call holds until it ends; it grows with output that is
    kept."""
    budget: MemoryBudget
    """Memory budget in which output counts that the client has not read."""
    refusals: Refusals = field(default_factory=Refusals)
    replaying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that a call holds while it replays tokens: only one call does so at a time."""
    max_at_once: int = 32
    """Largest number of answers of the call that the scheduler has at a time."""
    account: scheduler_pb2.Account | None = None
    """Account for which the scheduler counts the call."""
