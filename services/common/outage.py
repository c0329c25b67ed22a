"""What the log says of a peer that cannot be reached for long: a warning with its address, another
one every ten minutes, and a line when the peer answers.

A peer that starts later than its caller cannot be reached for some seconds, which is no reason for
a warning.
"""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LASTING_S = 10.0
"""Seconds after which it is worth a warning that a peer cannot be reached."""

AGAIN_S = 600.0
"""Seconds between two warnings about one peer."""


class Outage:
    """Logs that a peer, such as `the worker at 10.0.0.7:50053`, cannot be reached for long."""

    def __init__(self, peer: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._peer = peer
        self._clock = clock
        self._since: float | None = None  # when the peer failed first
        self._n_warnings = 0

    def note_failure(self, reason: str) -> None:
        """Notes that an attempt to reach the peer has failed."""
        now = self._clock()
        if self._since is None:
            self._since = now
        for_s = now - self._since
        if for_s >= LASTING_S + self._n_warnings * AGAIN_S:
            self._n_warnings += 1
            log.warning("%s cannot be reached for %.0f s: %s", self._peer, for_s, reason)

    def note_answer(self) -> None:
        """Notes that the peer has answered."""
        if self._n_warnings:
            log.info("%s answers", self._peer)
        self._since, self._n_warnings = None, 0
