"""Turns of calls to receive, of which there are few, since each may take a whole message's memory.

When all are taken, a call waits, the newest first in line. One that has had its turn for a second
loses it to one that waits.
"""

import asyncio
from types import TracebackType

from services.common import errors
from services.frontend.request.memory_budget import RETRY_AFTER_S
from services.frontend.request.refusals import Refusal, Refusals

MAX_WAITING = 1024
"""Calls that wait, with up to 64 KiB each in gRPC; beyond that the one that has waited longest is
refused, of the same client if it has many."""

MANY_PART = 16
"""Divides the calls that may wait: so many of one client are many, and it is refused before
others."""

HOLD_S = 1.0
"""Seconds for which a call keeps its turn while others wait."""


class Turns:
    """A number of turns, and the calls that have or want one."""

    def __init__(
        self,
        n_turns: int,
        refusals: Refusals,
        *,
        hold_s: float = HOLD_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._n_turns = n_turns
        self._refusals = refusals
        self._hold_s = hold_s
        self._max_waiting = max_waiting
        self._many = max(1, max_waiting // MANY_PART)
        self._held: dict[Turn, None] = {}
        self._waiting: dict[Turn, None] = {}
        self._of_peers: dict[str, dict[Turn, None]] = {}
        """Those that wait, by client."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, peer: str) -> "Turn":
        """Returns a turn of this task for a client, which waits on entering until it has come."""
        return Turn(self, peer)

    async def begin(self, turn: "Turn") -> None:
        """Waits until it is the turn's time.

        Raises:
            PoolFull: too many wait.
        """
        if len(self._held) < self._n_turns:
            turn.begin()
            self._held[turn] = None
            return
        if len(self._waiting) >= self._max_waiting:
            self._refuse_oldest(turn.peer)
        self._waiting[turn] = None
        self._of_peers.setdefault(turn.peer, {})[turn] = None
        self._press()
        try:
            await turn.has_come
        except asyncio.CancelledError:
            self.end(turn)
            raise

    def end(self, turn: "Turn") -> None:
        """Gives a turn, or the wish for one, to whoever waits."""
        self._leave(turn)
        self._held.pop(turn, None)
        while self._waiting and len(self._held) < self._n_turns:
            newest = next(reversed(self._waiting))
            self._leave(newest)
            if not newest.has_come.done():
                newest.begin()
                self._held[newest] = None
        if self._waiting:
            self._press()

    def refuse(self) -> errors.PoolFull:
        """Counts a refusal and returns its error."""
        self._refusals[Refusal.MEMORY] += 1
        return errors.PoolFull(
            "too many requests are being received; try again", retry_after_s=RETRY_AFTER_S
        )

    def _refuse_oldest(self, peer: str) -> None:
        """Refuses the call that has waited longest: of those of a client that has many, else of
        all."""
        of_peer = self._of_peers.get(peer, {})
        oldest = next(iter(of_peer if len(of_peer) >= self._many else self._waiting))
        self._leave(oldest)
        if not oldest.has_come.done():
            oldest.has_come.set_exception(self.refuse())

    def _leave(self, turn: "Turn") -> None:
        """Takes a call out of those that wait, if it does."""
        if turn in self._waiting:
            del self._waiting[turn]
            of_peer = self._of_peers[turn.peer]
            del of_peer[turn]
            if not of_peer:
                del self._of_peers[turn.peer]

    def _press(self) -> None:
        """Takes turns that have lasted away, as many as calls wait; comes back for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        n_lost = sum(turn.is_lost for turn in self._held)
        now = asyncio.get_running_loop().time()
        for turn in self._held:
            if n_lost >= len(self._waiting):
                return
            if turn.is_lost:
                continue
            if now < turn.began_at + self._hold_s:
                left_s = turn.began_at + self._hold_s - now
                self._timer = asyncio.get_running_loop().call_later(left_s, self._press)
                return
            turn.lose()
            n_lost += 1


class Turn:
    """One call's turn, while the `with` block runs."""

    def __init__(self, turns: Turns, peer: str) -> None:
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.has_come: asyncio.Future[None] = loop.create_future()
        self.began_at = 0.0
        self.is_lost = False
        self._turns = turns
        self._task = asyncio.current_task()

    def begin(self) -> None:
        """Notes that the turn has come."""
        self.began_at = asyncio.get_running_loop().time()
        self.has_come.set_result(None)

    def lose(self) -> None:
        """Ends the block: another takes its place."""
        self.is_lost = True
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> None:
        await self._turns.begin(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._turns.end(self)
        if not self.is_lost or self._task is None or self._task.uncancel() > 0:
            return  # whatever else has cancelled the task goes on
        if kind is None:
            return  # it was done already
        raise self._turns.refuse() from None
