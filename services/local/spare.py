"""Keeps a spare of a service: a process that has started, and waits until the service ends.

Another spare starts when the spare is taken or ends. A spare that ends again and again before it
waits is not started any more: then the service is started anew when it ends.
"""

import asyncio
from collections.abc import Awaitable, Callable

from services.common.process import happens_before
from services.local.child import Child
from services.local.restart_limit import RestartLimit

PAUSE_S = 1.0
"""Seconds before a spare is started, and between two looks whether the service is ready. A process
that has just taken over has the processors for itself in this time."""


class Spare:
    """The spare of one service, if it has one now."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Child]],
        *,
        is_wanted: Callable[[], bool],
        tell: Callable[[str], None],
        limit: RestartLimit,
    ) -> None:
        """`start` starts a process that waits. A spare starts only while `is_wanted` returns True.
        `tell` is called with the reason if no spare is started any more."""
        self.waiting: Child | None = None
        """The process that waits."""
        self._name = name
        self._start = start
        self._is_wanted = is_wanted
        self._tell = tell
        self._limit = limit
        self._is_taken = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Keeps a spare from now on."""
        self._keeping = asyncio.create_task(self._keep(), name=f"spare {self._name}")

    def take(self) -> Child | None:
        """Lets the spare serve, and returns it. Returns None if no spare waits."""
        spare, self.waiting = self.waiting, None
        if spare is None or not spare.begin():
            return None
        self._is_taken.set()
        return spare

    async def stop(self) -> None:
        """Ends the spare without starting another one."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        if self.waiting is not None:
            await self.waiting.stop()

    async def _keep(self) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None:
            await asyncio.sleep(PAUSE_S + pause_s)
            if not self._is_wanted():
                continue
            try:
                spare = await self._start()
            except OSError as error:
                self._tell(f"{self._name} has no spare any more: {error}")
                return
            self._is_taken.clear()
            self.waiting = spare
            await happens_before(asyncio.create_task(spare.wait_for_end()), self._is_taken)
            pause_s = self._limit.pause_s(was_ready=spare.said.get("spare", False))
            if not self._is_taken.is_set():
                self.waiting = None
                await spare.stop()
        self._tell(f"{self._name} has no spare any more, since its spares end before they wait")
