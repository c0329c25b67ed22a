"""Keeps a spare of a service: a process that has started up and waits until the service ends.

When the service ends, the launcher writes a byte to the pipe `turn_fd` of the spare. The spare then
binds the addresses of the service and serves (`services.common.process.wait_for_turn`). Another
spare is started when the spare serves or ends. If spares end several times in a row before they are
ready to take over, no more spares are started. From then on, when the service ends, a new process
of it is started instead.
"""

import asyncio
from collections.abc import Awaitable, Callable

from services.common.process import happens_before
from services.local.child import Child, ChildDied
from services.local.restart_limit import RestartLimit

PAUSE_S = 1.0
"""Seconds before a spare is started, and between two checks whether the service is ready. A process
that has just taken over has the processors for itself in this time."""

START_LIMIT_S = 120.0
"""Seconds within which a spare must be ready to take over. After that it counts as hung."""


class Spare:
    """Keeps at most one spare of a service."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Child]],
        *,
        is_wanted: Callable[[], bool],
        tell: Callable[[str], None],
        limit: RestartLimit,
    ) -> None:
        """`start` starts a process as a spare. It is called only while `is_wanted` returns True.
        `tell` is called with the reason if no spare is started any more. `limit` counts the spares
        that end before they are ready to take over."""
        self.process: Child | None = None
        """The spare that is ready to take over, or None if there is none."""
        self._name = name
        self._start = start
        self._is_wanted = is_wanted
        self._tell = tell
        self._limit = limit
        self._is_taken = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the task that keeps a spare."""
        self._keeping = asyncio.create_task(self._keep(), name=f"spare {self._name}")

    def take(self) -> Child | None:
        """Lets the spare serve, and returns its process. Returns None if no spare is ready to take
        over."""
        spare, self.process = self.process, None
        if spare is None or not spare.let_serve():
            return None
        self._is_taken.set()
        return spare

    async def stop(self) -> None:
        """Ends the spare without starting another one."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))

    async def _keep(self) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None:
            await asyncio.sleep(PAUSE_S + pause_s)
            if not self._is_wanted():
                continue
            self._is_taken.clear()
            try:
                spare = await self._start()
            except OSError as error:
                self._tell(f"{self._name} has no spare any more: {error}")
                return
            pause_s = self._limit.pause_s(was_ready=await self._offer(spare))
        self._tell(f"{self._name} has no spare any more, since its spares end before they wait")

    async def _offer(self, spare: Child) -> bool:
        """Makes a started spare available to `take`: waits until the spare is ready to take over,
        and then until `take` has let the spare serve or the spare has ended. Stops a spare that
        does not serve. Returns False if the spare ended before it was ready, or was not ready
        within `START_LIMIT_S`."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await spare.wait_for("waits_for_turn")
            self.process = spare
            await happens_before(asyncio.create_task(spare.wait_for_end()), self._is_taken)
        except (ChildDied, TimeoutError):
            return False
        finally:
            if not self._is_taken.is_set():
                self.process = None
                await spare.stop(limit_s=0.0)  # it holds nothing
        return True
