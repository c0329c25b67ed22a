"""Replacement for admission control where that is off: every request may wait."""

from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request


class NoControl:
    """Admission control that refuses no request and learns nothing."""

    def check(self, request: Request, now: float) -> float:
        """Returns 0, which means that there is no forecast."""
        return 0.0

    def note_submitted(self, request: Request, wait_s: float, now: float) -> None:
        """Does nothing: forecasts are not needed."""

    def note_waiting(self, request: Request, *, has_begun: bool) -> None:
        """Does nothing: waiting work is not counted."""

    def note_not_waiting(self, request: Request) -> None:
        """Does nothing: waiting work is not counted."""

    def hopeless(self, now: float, earliest_deadline: float, order: Order) -> list[Request]:
        """Returns an empty list: each request may wait until its deadline."""
        return []


NO_CONTROL = NoControl()
