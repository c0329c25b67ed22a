"""Keeps a spare of a service: a process that has started, and waits for its turn.

When the service ends, the launcher writes a byte to the pipe `turn_fd` of the spare, which then
binds the addresses of the service and serves (`services.common.process.wait_for_turn`). Another
spare starts when the spare is taken or ends. A spare that ends again and again before it waits is
not started any more: then the service is started anew when it ends.
"""

import asyncio
from collections.abc import Awaitable, Callable

from services.common.process import happens_before
from services.local.child import Child, ChildDied
from services.local.restart_limit import RestartLimit

PAUSE_S = 1.0
"""Seconds before a spare is started, and between two looks whether the service is ready. A process
that has just taken over has the processors for itself in this time."""

START_LIMIT_S = 120.0
"""Seconds after which a spare that does not wait for its turn counts as hung."""


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
        self.process: Child | None = None
        """The process that waits for its turn."""
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
        """Lets the spare serve, and returns it. Returns None if no spare waits for its turn."""
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
        """Lets the process be taken once it waits for its turn. Returns when it is taken or has
        ended. Returns whether it was ready: False if it ended or hung before it waited."""
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
