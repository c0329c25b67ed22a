"""Receives the requests of one gRPC call and sends its responses. For clients that are not trusted,
limits the time that each message may take.

gRPC has no timeout for a request that does not arrive, or for a client that does not read. A server
in Python cannot end a call whose client does not read. So in this case, only the method of the call
is aborted, and its resources are released at once. The status of the call waits in gRPC until the
client reads or disconnects.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from services.common import errors

Metadata = Sequence[tuple[str, str]]
"""Metadata of a gRPC call, as pairs of a name and a value."""

N_TURNS = 4
"""Number of turns of the event loop into which a `LoopTimer` divides its time limit."""


class Exchange:
    """Receives the requests of one call and sends its responses, without timeouts. For trusted
    callers."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def receive(self, _: type[Message]) -> Any:
        """Returns the bytes of the call's next request, or gRPC's EOF. The argument, a message
        type, is ignored."""
        return await self._context.read()

    async def write(self, message: Any) -> None:
        """Sends a response message. Returns when gRPC has sent the message, or has put it into its
        buffer."""
        await self._context.write(message)

    def hand_over(self, _: Any) -> None:
        """Hook for the response of a unary call. Called with the response after the RPC method has
        returned and before gRPC sends it. Does nothing here."""

    async def send_metadata(self) -> None:
        """Hook that sends the metadata which precedes the response of a unary call. Does nothing
        here."""

    def close(self, _: object = None) -> None:
        """Hook that releases resources of the call. Called when the call's task has ended and the
        call's status has been sent. Does nothing here."""


class LoopTimer:
    """A timer that does not read a clock. It divides its time limit into a few equal turns. For
    each turn, it asks the event loop to wait once, and it counts the turns down.

    If the event loop does not run for a while, because the process got no processor or was stopped,
    this time counts as one turn only, so the client loses at most one turn of its time limit. The
    timer may be late by one turn.
    """

    def __init__(self, limit_s: float, on_limit: Callable[[], None]) -> None:
        """Starts the timer. After `limit_s` seconds, `on_limit` is called. That function may
        restart the timer."""
        self._loop = asyncio.get_running_loop()
        self._turn_s = limit_s / N_TURNS
        self._on_limit = on_limit
        self.restart()
        self._handle = self._loop.call_later(self._turn_s, self._turn)

    def restart(self) -> None:
        """Starts the time limit again from zero."""
        self._n_left = N_TURNS + 1  # the first may be nearly over

    def cancel(self) -> None:
        """Stops the timer."""
        self._handle.cancel()

    def _turn(self) -> None:
        self._n_left -= 1
        if not self._n_left:
            self._on_limit()
        if self._n_left:
            self._handle = self._loop.call_later(self._turn_s, self._turn)


class TimedExchange(Exchange):
    """Receives the requests of one call and sends its responses, with a timeout for each message.

    One timer watches all writes of a call; each message restarts the timer. An object of this class
    must be made, and used, in the task that answers the call.
    """

    def __init__(
        self,
        context: Any,
        *,
        receive_limit_s: float,
        send_limit_s: float,
        metadata: Metadata = (),
    ) -> None:
        """Makes the exchange for one call. `receive_limit_s` is the timeout for the request, and
        `send_limit_s` is the timeout for each response message. `metadata` is sent before the first
        response."""
        super().__init__(context)
        self._metadata = metadata
        self._receive_limit_s = receive_limit_s
        self._send_limit_s = send_limit_s
        self._task = asyncio.current_task()
        self._timer: LoopTimer | None = None
        self._is_writing = False
        self._is_unread = False

    async def receive(self, request_class: type[Message]) -> Any:
        """Returns the bytes of the call's next request, or gRPC's EOF.

        Raises:
            TimedOut: the request did not arrive in time.
        """
        try:
            async with asyncio.timeout(self._receive_limit_s):
                return await super().receive(request_class)
        except TimeoutError:
            raise errors.TimedOut("the request did not come in time") from None

    async def write(self, message: Any) -> None:
        """Sends a response message. Returns when gRPC has sent the message, or has put it into its
        buffer.

        Raises:
            TimedOut: the client did not read in time.
        """
        self._is_writing = True
        try:
            if self._timer is not None:
                self._timer.restart()
            else:
                self._timer = LoopTimer(self._send_limit_s, self._end_unread)
                # On its own: a write that carries it and waits would let no status follow.
                await self._context.send_initial_metadata(self._metadata)
            await self._context.write(message)
            self._is_writing = False
        except asyncio.CancelledError:
            if not self._is_unread or self._task is None or self._task.uncancel() > 0:
                raise
            self.note_unread(message)
            raise errors.TimedOut(f"the answer was not read for {self._send_limit_s:g} s") from None

    async def send_metadata(self) -> None:
        """Sends the metadata that precedes the response of a unary call. Does nothing if there is
        no metadata."""
        if self._metadata:
            with suppress(grpc.aio.BaseError):  # the client is gone
                await self._context.send_initial_metadata(self._metadata)

    def note_unread(self, _: Any) -> None:
        """Hook for a response that the client did not read within the timeout. gRPC still holds the
        response. Does nothing here."""

    def close(self, _: object = None) -> None:
        """Stops the timer of the call."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_unread(self) -> None:
        """Called at the time limit. If a write is waiting for the client, cancels the task of the
        call. If none is, the RPC method is slow, not the client, so the timer is restarted."""
        if self._is_writing and self._task is not None:
            self._is_unread = True
            self._task.cancel()
        elif self._timer is not None:
            self._timer.restart()
