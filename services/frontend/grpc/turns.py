"""Turns: a call may receive its message only while it has a turn. Only a few calls have a turn at a
time, because each call that receives may take the memory of a whole message.

When all turns are taken, further calls wait. A client with few waiting calls gets the next turn
(`waiting_calls.py`). A call that has had its turn for `HOLD_S` seconds loses the turn to a waiting
call.
"""

import asyncio
from types import TracebackType

from services.common import errors
from services.frontend.grpc.waiting_calls import WaitingCalls
from services.frontend.request.refusals import Refusal, Refusals

MAX_WAITING = 1024
"""Largest number of waiting calls; each may hold up to 64 KiB in gRPC. Beyond this number, each new
call causes a waiting call of a client with many waiting calls to be refused."""

HOLD_S = 1.0
"""Seconds for which a call keeps its turn while other calls wait."""


class Turns:
    """Limits how many calls of a server receive their messages at the same time: gives turns to
    calls, and makes the other calls wait for a turn."""

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
        self._held: dict[Turn, None] = {}
        self._waiting: WaitingCalls[Turn] = WaitingCalls()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, peer: str) -> "Turn":
        """Returns a turn for the call that runs in this task. `peer` names the client of the call.
        The turn is a context, and entering the context waits until the call may receive."""
        return Turn(self, peer)

    async def begin(self, turn: "Turn") -> None:
        """Waits until a turn is free for the call that `turn` belongs to.

        Raises:
            PoolFull: too many calls wait.
        """
        if len(self._held) < self._n_turns:
            turn.begin()
            self._held[turn] = None
            return
        if len(self._waiting) >= self._max_waiting:
            self._refuse_one()
        self._waiting.add(turn.peer, turn)
        self._press()
        try:
            await turn.has_come
        except asyncio.CancelledError:
            self.end(turn)
            raise

    def end(self, turn: "Turn") -> None:
        """Ends a turn, or the wait for it, and gives free turns to waiting calls."""
        self._waiting.discard(turn.peer, turn)
        self._held.pop(turn, None)
        while self._waiting and len(self._held) < self._n_turns:
            following = self._waiting.take_next()
            if not following.has_come.done():
                following.begin()
                self._held[following] = None
        if self._waiting:
            self._press()

    def refuse(self) -> errors.PoolFull:
        """Counts a refused call and returns the error for it."""
        self._refusals[Refusal.MEMORY] += 1
        return errors.PoolFull("too many requests are being received; try again")

    def _refuse_one(self) -> None:
        """Refuses the oldest waiting call of a client with many waiting calls."""
        refused = self._waiting.take_refused()
        if not refused.has_come.done():
            refused.has_come.set_exception(self.refuse())

    def _press(self) -> None:
        """Ends turns that have lasted for `hold_s` seconds, at most one for each waiting call. Sets
        a timer for the next turn that may have to end."""
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
    """The permission of one call to receive its message. Entering the context waits for the
    permission, and leaving the context gives the permission back."""

    def __init__(self, turns: Turns, peer: str) -> None:
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.has_come: asyncio.Future[None] = loop.create_future()
        self.began_at = 0.0
        self.is_lost = False
        self._turns = turns
        self._task = asyncio.current_task()

    def begin(self) -> None:
        """Lets the call receive its message, beginning now."""
        self.began_at = asyncio.get_running_loop().time()
        self.has_come.set_result(None)

    def lose(self) -> None:
        """Cancels the code in the call's `async with` block, because another call gets the turn."""
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
            return  # the task was cancelled for another reason
        if kind is None:
            return  # the message had been received already
        raise self._turns.refuse() from None
