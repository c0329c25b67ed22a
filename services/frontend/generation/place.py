"""The place that one call takes in this process."""

import asyncio
from dataclasses import dataclass, field

from orcinus.v1 import scheduler_pb2

from services.frontend.request.answers_in_flight import AnswersInFlight
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The resources of the process that one call holds."""

    in_flight: AnswersInFlight
    """Its answers that are not over for the scheduler. Who reads slowly keeps nobody else out."""
    share: Share
    """The memory that it takes until it ends; it grows with output that is kept."""
    budget: MemoryBudget
    """The memory that its unread output is counted in."""
    refusals: Refusals = field(default_factory=Refusals)
    replaying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one call whose tokens are read once more."""
    max_at_once: int = 32
    """Answers that are with the scheduler at a time."""
    account: scheduler_pb2.Account | None = None
    """Whom the scheduler is told that the call is for."""
