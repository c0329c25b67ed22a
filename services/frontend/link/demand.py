"""Tells the scheduler how many requests this frontend holds (keeps until a pipeline serves) while
the model is asleep or starts.

The first held request wakes the model, and the scheduler keeps it awake while requests are held. Of
many changes within a short time, only the last number is sent.
"""

import asyncio
from collections.abc import Callable

from orcinus.v1 import scheduler_pb2

PAUSE_S = 0.05
"""Seconds between a change of the number of held requests and the message to the scheduler about
the change."""


class Demand:
    """Sends the number of held requests, which wait for a pipeline, to the scheduler."""

    def __init__(
        self, count: Callable[[], int], send: Callable[[scheduler_pb2.ConnectRequest], None]
    ) -> None:
        """`count` returns the number of held requests. `send` sends a message to the scheduler."""
        self._count = count
        self._send = send
        self._is_wanted = False
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Sends the number of held requests now, and after each change from now on."""
        self._is_wanted = True
        self._tell()

    def end(self) -> None:
        """Stops sending the number of held requests. Called when a pipeline serves, or when the
        scheduler is lost."""
        self._is_wanted = False
        self._cancel()

    def note_change(self) -> None:
        """Schedules a message to the scheduler, because the number of held requests may have
        changed."""
        if self._is_wanted and self._next is None:
            self._next = asyncio.get_running_loop().call_later(PAUSE_S, self._tell)

    def _tell(self) -> None:
        self._cancel()
        demand = scheduler_pb2.Demand(n_requests=self._count())
        self._send(scheduler_pb2.ConnectRequest(demand=demand))

    def _cancel(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
