"""A gate that refuses new calls while the scheduler's pool is full, before they cost anything.

The scheduler says with each message how many places are free. Of these the gate takes away what it
cannot know yet: the submissions that are not answered, and the calls that were let in and have
not submitted anything. Such a call keeps its place for a moment only, since its body may be slow,
or wrong: then the place is the next one's, and the scheduler decides between the two.

Other frontends have the same places. The scheduler refuses those that come too late.
"""

from collections import deque

from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.link.scheduler_events import DEFAULT_RETRY_AFTER_S
from services.frontend.request.refusals import Refusal, Refusals

PASSAGE_S = 0.25
"""Seconds for which a call that was let in keeps a place, unless it submits a request before."""


class PoolGate:
    """The places of the pool, as far as one frontend knows; times are those of one clock."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._n_free: int | None = None  # as the scheduler has said last
        self._n_unanswered = 0
        self._passing: deque[float] = deque()
        """When each of the calls that have not submitted anything loses its place."""

    def reset(self) -> None:
        """Forgets the scheduler: there is another one, or the same on a new stream."""
        self._n_free, self._n_unanswered = None, 0

    def update(self, response: scheduler_pb2.ConnectResponse) -> None:
        """Notes what a message of the scheduler says."""
        self._n_unanswered -= len(response.accepted) + len(response.rejected)
        if response.HasField("n_free"):
            self._n_free = response.n_free

    def note_sent(self) -> None:
        """Notes that a request was submitted: it no longer passes, and waits for an answer."""
        self._n_unanswered += 1
        if self._passing:
            self._passing.popleft()

    def enter(self, now: float) -> None:
        """Lets a call in.

        Raises:
            PoolFull: there is no place for it.
        """
        while self._passing and self._passing[0] <= now:
            self._passing.popleft()
        if self._n_free is not None and (self._n_free <= self._n_unanswered + len(self._passing)):
            self._refusals[Refusal.IN_FLIGHT] += 1
            raise errors.PoolFull("too many requests", retry_after_s=DEFAULT_RETRY_AFTER_S)
        self._passing.append(now + PASSAGE_S)
