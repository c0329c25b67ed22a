"""Logs repeated failures in few lines: one line when an outage begins, one every ten minutes while
it lasts, with the number of failures, and one when it is over.

Otherwise a repeated failure would fill the log with a line for every attempt.
"""

import logging
import threading
import time
from collections.abc import Callable

REPEAT_S = 600.0
"""Seconds between two log lines about an outage that has not ended."""

PEER_PATIENCE_S = 10.0
"""Seconds for which a peer must be unreachable before this is logged. The peer may simply start
later than its caller."""


class OutageLog:
    """Writes the log lines about one kind of failure. Any thread may call the methods.

    There is at most one line about failures every `REPEAT_S` seconds, even if attempts fail and
    succeed in turn.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        failing: str,
        works: str,
        counted: str,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failing` and `works` are the messages at the beginning and at the end of an outage.
        `counted` is the text after a number of failures in messages, such as `attempts failed`. An
        outage is logged once it has lasted for `patience_s` seconds."""
        self._logger = logger
        self._failing, self._works, self._counted = failing, works, counted
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._n_failed = 0
        """Number of failures of the present outage, and of earlier outages that are still to be
        logged."""
        self._since = 0.0
        """Time of the first failure that `_n_failed` counts."""
        self._said_at: float | None = None
        self._is_said = False

    @classmethod
    def of_peer(
        cls, logger: logging.Logger, peer: str, *, clock: Callable[[], float] = time.monotonic
    ) -> "OutageLog":
        """Returns an outage log for failures to reach a peer. `peer` is a noun for messages, such
        as `the worker at 10.0.0.7:50053`."""
        return cls(
            logger,
            failing=f"{peer} cannot be reached",
            works=f"{peer} answers",
            counted="attempts failed",
            patience_s=PEER_PATIENCE_S,
            clock=clock,
        )

    def failed(self, reason: object, n: int = 1) -> None:
        """Counts `n` failures. Logs all counted failures if the outage has lasted for `patience_s`
        and the last line about failures is at least `REPEAT_S` seconds old."""
        with self._lock:
            now = self._clock()
            if self._n_failed == 0:
                self._since = now
            count = f"; {self._total(now)}" if self._n_failed else ""
            self._n_failed += n
            if now - self._since >= self._patience_s and self._may_repeat(now):
                self._logger.warning("%s: %s%s", self._failing, reason, count)
                self._said_at, self._is_said = now, True

    def worked(self) -> None:
        """Records a success. Logs the end of the outage if its failures were logged.

        An outage that was not logged is forgotten, with one exception. If it lasted for
        `patience_s`, and the last line about failures is younger than `REPEAT_S`, its failures are
        kept for the next line.
        """
        if not self._n_failed:
            return
        with self._lock:
            now = self._clock()
            if self._is_said:
                self._logger.info("%s; %s", self._works, self._total(now))
            elif now - self._since >= self._patience_s and not self._may_repeat(now):
                return
            self._n_failed, self._is_said = 0, False

    def _may_repeat(self, now: float) -> bool:
        return self._said_at is None or now - self._said_at >= REPEAT_S

    def _total(self, now: float) -> str:
        return f"{self._n_failed} {self._counted} in {now - self._since:.0f} s"
