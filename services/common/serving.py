"""Detects whether a service serves, which means that requests that arrive now get tokens.

To serve is not the same as to be ready, which means that traffic may be routed here: a frontend
that holds requests for a moment is ready. A service does not serve in three cases: it has no
pipeline; requests wait and no token was produced for `SILENCE_LIMIT_S` seconds; or its event loop
stands still. A prompt whose prefill alone takes longer than that limit also makes a service not
serve, because no request gets a token meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

SILENCE_LIMIT_S = 8.0
"""Seconds without progress after which waiting requests count as not being served."""

HELD_UP_S = 3.0
"""Longest time, in seconds, between two checks by the event loop. If the last check is older, the
event loop counts as standing still."""

PERIOD_S = 0.5


class ServingWatch:
    """Determines whether one process serves at present: whether requests that arrive now get
    tokens. `reason_against` may be called from any thread."""

    def __init__(
        self,
        *,
        trouble: Callable[[], str],
        n_waiting: Callable[[], int],
        details: Callable[[], str] = lambda: "",
        progress: str = "token",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`trouble` returns the reason why no request could be served, or an empty text. `details`
        returns further text about the reason, or an empty text. `n_waiting` returns the number of
        requests that wait for tokens. `progress` is the noun in messages about missing progress,
        such as `token` in "no token for 9 s"."""
        self._trouble = trouble
        self._details = details
        self._n_waiting = n_waiting
        self._progress = progress
        self._clock = clock
        self._looked_at = self._progress_at = self._well_at = clock()

    def note_progress(self) -> None:
        """Records progress: a request has got tokens, has come nearer to its next tokens, or has
        ended."""
        self._progress_at = self._clock()

    def look(self) -> None:
        """Records the present state of the process, and that its event loop runs. Call it from the
        event loop, at least once per second."""
        self._looked_at = self._clock()
        if not self._n_waiting():
            self._progress_at = self._looked_at
        if not self._trouble():
            self._well_at = self._looked_at

    def reason_against(self) -> str:
        """Returns the reason why new requests would have to wait. The result is empty if they would
        be served."""
        now = self._clock()
        if now - self._looked_at > HELD_UP_S:
            return f"this process has been held up for {now - self._looked_at:.0f} s"
        if trouble := self._trouble():
            details = self._details()
            more = f": {details}" if details else ""
            return f"{trouble} for {now - self._well_at:.0f} s{more}"
        n_waiting = self._n_waiting()
        if n_waiting and now - self._progress_at > SILENCE_LIMIT_S:
            silent_s = now - self._progress_at
            return f"no {self._progress} for {silent_s:.0f} s while {n_waiting} requests wait"
        return ""

    async def run(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Calls `tell` every `PERIOD_S` seconds until cancelled. The argument of the call says
        whether this process serves at that moment."""
        while True:
            # Reported before `look`, so that a hang of the event loop until now is reported too.
            await tell(not self.reason_against())
            self.look()
            await asyncio.sleep(PERIOD_S)
