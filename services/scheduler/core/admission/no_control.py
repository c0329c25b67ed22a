"""Admission control where it is off: every request may wait."""

from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request


class NoControl:
    """Refuses no request, and learns nothing."""

    def check(self, request: Request, now: float) -> float:
        """Returns 0: nothing is known of the time that a request would wait."""
        return 0.0

    def note_submitted(self, request: Request, wait_s: float, now: float) -> None:
        """Needs not know which requests are in the pool."""

    def note_waiting(self, request: Request, *, has_begun: bool) -> None:
        """Needs not know which requests wait."""

    def note_not_waiting(self, request: Request) -> None:
        """Needs not know which requests wait no longer."""

    def hopeless(self, now: float, earliest_deadline: float, order: Order) -> list[Request]:
        """Returns no request: each may wait until its deadline."""
        return []


NO_CONTROL = NoControl()
