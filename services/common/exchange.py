"""The messages of one call, as they come and go, and how long each may take.

gRPC waits without a limit, for a request that does not come and for a client that does not read.
Nor can a server's call be cancelled from Python. A call that nobody reads is aborted: it gives
back at once what its method holds, and its status waits in gRPC until the client reads or goes.
"""

import asyncio
from typing import Any

from google.protobuf.message import Message

from services.common import errors


class Exchange:
    """The messages of one call, without limits: for callers that are known."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def receive(self, _: type[Message]) -> Any:
        """Returns the bytes of the call's next request, or gRPC's EOF; takes its type."""
        return await self._context.read()

    async def write(self, message: Any) -> None:
        """Sends an answer; returns when gRPC has sent it, or has room for it."""
        await self._context.write(message)

    def hand_over(self, _: Any) -> None:
        """Notes the one answer of a call, which gRPC sends when the call's method has ended."""

    def close(self, _: object = None) -> None:
        """Gives back what the messages hold; comes when the call's task has ended, and its status
        is sent."""


class TimedExchange(Exchange):
    """The messages of one call, each of which has its time.

    One timer watches all writes of a call: it looks when a write could have taken too long, so that
    a message costs a look at the clock. Must be made, and used, in the task that answers the call.
    """

    def __init__(self, context: Any, *, receive_limit_s: float, send_limit_s: float) -> None:
        super().__init__(context)
        self._receive_limit_s = receive_limit_s
        self._send_limit_s = send_limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._writing_since: float | None = None
        self._is_unread = False

    async def receive(self, request_class: type[Message]) -> Any:
        """Returns the bytes of the call's next request, or gRPC's EOF.

        Raises:
            TimedOut: it did not come in time.
        """
        try:
            async with asyncio.timeout(self._receive_limit_s):
                return await super().receive(request_class)
        except TimeoutError:
            raise errors.TimedOut("the request did not come in time") from None

    async def write(self, message: Any) -> None:
        """Sends an answer; returns when gRPC has sent it, or has room for it.

        Raises:
            TimedOut: the client did not read in time.
        """
        self._writing_since = self._loop.time()
        try:
            if self._timer is None:
                self._timer = self._loop.call_later(self._send_limit_s, self._look)
                # On its own: a write that carries it and waits would let no status follow.
                await self._context.send_initial_metadata(())
            await self._context.write(message)
            self._writing_since = None
        except asyncio.CancelledError:
            if not self._is_unread or self._task is None or self._task.uncancel() > 0:
                raise
            self.note_unread(message)
            raise errors.TimedOut(f"the answer was not read for {self._send_limit_s:g} s") from None

    def note_unread(self, _: Any) -> None:
        """Notes an answer that was not read in time, and stays with gRPC."""

    def close(self, _: object = None) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Cancels the task if its write has taken too long; comes back when it may have."""
        wait_s = self._send_limit_s
        if self._writing_since is not None:
            wait_s -= self._loop.time() - self._writing_since
        if wait_s > 0 or self._task is None:
            self._timer = self._loop.call_later(wait_s, self._look)
        else:
            self._is_unread = True
            self._task.cancel()
