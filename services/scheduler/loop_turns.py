"""Divides the turns of the event loop among serving loops: one loop runs in each turn.

In one turn, the event loop runs all tasks that are ready, and then reads what has come meanwhile.
If many pipelines return at once and all of them were served in one turn, submissions would be read
only once in that long time, and batches would lack the requests that have come. So one pipeline is
served in each turn.
"""

import asyncio
from collections import deque
from typing import Literal


class LoopTurns:
    """Gives turns of the event loop to callers, in the order in which they ask."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        """Waits until no other caller has the present turn. The caller has the turn until it
        waits for something else."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            self._waiting.append(loop.create_future())
            await self._waiting[-1]
        else:
            self._is_taken = True
            loop.call_soon(self._end)

    def _end(self) -> None:
        """Ends the present turn, and gives the next one to the first caller that still waits."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # otherwise it was cancelled
                first.set_result(None)
                asyncio.get_running_loop().call_soon(self._end)
                return
        self._is_taken = False


class TurnEvent(asyncio.Event):
    """An event whose `wait` returns in a turn of the event loop that no other caller has."""

    def __init__(self, turns: LoopTurns) -> None:
        super().__init__()
        self._turns = turns

    async def wait(self) -> Literal[True]:
        """Waits until the event is set, and then for a turn."""
        await super().wait()
        await self._turns.take()
        return True
