"""Says in few lines that something fails again and again: once when it begins, every ten minutes
while it lasts, with a count, and once when it is over.

What fails with every attempt would otherwise fill the log for as long as it lasts.
"""

import logging
import threading
import time
from collections.abc import Callable

REPEAT_S = 600.0
"""Seconds between two lines about a failure that goes on."""


class OutageLog:
    """The lines about one kind of failure. Any thread may call it.

    What fails and works by turns is said every `REPEAT_S` at most, too.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        failing: str,
        works: str,
        counted: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failing` and `works` say that the failure has begun and that it is over. `counted` is
        what is counted."""
        self._logger = logger
        self._failing, self._works, self._counted = failing, works, counted
        self._clock = clock
        self._lock = threading.Lock()
        self._n_failed = 0
        """Number of failures since it last worked after a line about a failure."""
        self._since = 0.0
        self._said_at: float | None = None
        self._is_said = False

    def failed(self, reason: object, n: int = 1) -> None:
        """Notes `n` failures, and says so unless a line of the last `REPEAT_S` did."""
        with self._lock:
            now = self._clock()
            if self._n_failed == 0:
                self._since = now
            count = f"; {self._total(now)}" if self._n_failed else ""
            self._n_failed += n
            if self._said_at is None or now - self._said_at >= REPEAT_S:
                self._logger.warning("%s: %s%s", self._failing, reason, count)
                self._said_at, self._is_said = now, True

    def worked(self) -> None:
        """Notes that it has worked, and says so if a line said that it fails."""
        if not self._is_said:
            return
        with self._lock:
            self._logger.info("%s; %s", self._works, self._total(self._clock()))
            self._n_failed, self._is_said = 0, False

    def _total(self, now: float) -> str:
        return f"{self._n_failed} {self._counted} in {now - self._since:.0f} s"
