"""Refuses new calls that the scheduler would refuse, before any work is done for them.

The scheduler's messages say how many free places its pool of requests has. `PoolGate` subtracts the
requests that the scheduler has neither accepted nor rejected yet. The number is used for one second
only, because a frontend without requests gets no newer number. If a request of another frontend
takes the last place in that second, the scheduler itself refuses the call.

The scheduler may also refuse a request because its first token would come too late. It then says
for how long this applies to all requests of the same account with the same or a lower priority.
`PoolGate` uses this statement for at most one second, too.
"""

from typing import NamedTuple

from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals

BELIEVED_S = 1.0
"""Seconds for which a statement of the scheduler is used, about its pool or about requests whose
first token would come too late."""

TOO_LATE = "the first token would come too late"


class Lateness(NamedTuple):
    """The scheduler's last refusal of a request of an account because the first token would come
    too late. Times are readings of one clock, in seconds."""

    priority: int
    """Highest priority that was refused as too late; requests of this priority and below are
    refused. A lower number is a higher priority."""
    believed_until: float
    lasts_until: float


class PoolGate:
    """Refuses calls according to the scheduler's last reports: about the free places in its pool,
    and about accounts whose requests would get their first token too late."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._n_free: int | None = None  # as the scheduler said last
        self._n_unanswered = 0
        self._told_at = 0.0
        self._late: dict[str, Lateness] = {}  # by account

    def reset(self) -> None:
        """Forgets the reported number of free places, and which requests would get their first
        token too late. Called when the scheduler or the stream has changed."""
        self._n_free, self._n_unanswered = None, 0
        self._late.clear()

    def update(self, response: scheduler_pb2.ConnectResponse, *, now: float) -> None:
        """Notes the state of the pool that a message of the scheduler reports."""
        self._n_unanswered -= len(response.accepted) + len(response.rejected)
        if response.HasField("n_free"):
            self._n_free, self._told_at = response.n_free, now

    def note_sent(self) -> None:
        """Notes that a request was submitted that the scheduler has not answered yet."""
        self._n_unanswered += 1

    def check(self, *, now: float) -> None:
        """Checks that the scheduler's pool has a free place for another request. Succeeds if there
        is no report about the pool, or if the last report is too old to be used.

        Raises:
            PoolFull: by the last report, the pool has no free place.
        """
        if self._n_free is None or now >= self._told_at + BELIEVED_S:
            return
        if self._n_free <= self._n_unanswered:
            self._refusals[Refusal.IN_FLIGHT] += 1
            raise errors.PoolFull("too many requests")

    def note_late(self, account: str, priority: int, for_s: float, *, now: float) -> None:
        """Notes that requests of the account would have their first token too late during the next
        `for_s` seconds. This applies to requests of the priority `priority` and of lower
        priorities."""
        known = self._late.get(account)
        if known is None or known.priority >= priority or now >= known.believed_until:
            believed_until = now + min(for_s, BELIEVED_S)
            self._late[account] = Lateness(priority, believed_until, now + for_s)

    def check_time(self, account: str, priority: int, *, now: float) -> None:
        """Checks that a request of an account would have its first token in time.

        Raises:
            PoolFull: the first token of the request would be too late.
        """
        late = self._late.get(account)
        if late is not None and priority >= late.priority and now < late.believed_until:
            self._refusals[Refusal.TOO_LATE] += 1
            raise errors.PoolFull(TOO_LATE, retry_after_s=late.lasts_until - now)
