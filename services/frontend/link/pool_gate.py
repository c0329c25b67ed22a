"""A gate that refuses new calls while the scheduler's pool is full, before they cost anything.

The scheduler says with each message how many places are free; of these the gate takes away the
submissions that are not answered. A word is believed for a second: a frontend without requests gets
no other. Whoever comes too late all the same, behind a call that had yet
to submit its requests or behind another frontend's, is refused by the scheduler.
"""

from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.link.scheduler_events import DEFAULT_RETRY_AFTER_S
from services.frontend.request.refusals import Refusal, Refusals

BELIEVED_S = 1.0
"""Seconds for which the scheduler's last word of its places is believed."""


class PoolGate:
    """The places of the pool, as far as one frontend knows."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._n_free: int | None = None  # as the scheduler has said last
        self._n_unanswered = 0
        self._told_at = 0.0

    def reset(self) -> None:
        """Forgets the scheduler: there is another one, or the same on a new stream."""
        self._n_free, self._n_unanswered = None, 0

    def update(self, response: scheduler_pb2.ConnectResponse, *, now: float) -> None:
        """Notes what a message of the scheduler says; times are those of one clock."""
        self._n_unanswered -= len(response.accepted) + len(response.rejected)
        if response.HasField("n_free"):
            self._n_free, self._told_at = response.n_free, now

    def note_sent(self) -> None:
        """Notes that a request was submitted and waits for an answer."""
        self._n_unanswered += 1

    def check(self, *, now: float) -> None:
        """Returns if there seems to be a place.

        Raises:
            PoolFull: there is none.
        """
        if self._n_free is None or now >= self._told_at + BELIEVED_S:
            return
        if self._n_free <= self._n_unanswered:
            self._refusals[Refusal.IN_FLIGHT] += 1
            raise errors.PoolFull("too many requests", retry_after_s=DEFAULT_RETRY_AFTER_S)
