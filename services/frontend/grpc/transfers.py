"""The messages of all gRPC calls of this process, as they come and go, in bounded memory.

gRPC hands over whole messages, and says nothing of one before it is complete; while somebody reads,
it takes in as much as a message may have. So the number of calls that receive at a time is bounded.
All others wait, the newest first in line: their messages, if small, have come meanwhile and need no
time. A call that has received for a second gives its place to one that waits; a slow client with a
large message is served as long as there is nobody else.

An answer that nobody reads cannot be taken back from gRPC. Its bytes are counted until its client
goes, and a connection that has several such answers gets no more.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from services.common import errors
from services.common.exchange import LoopTimer, Metadata, TimedExchange
from services.frontend.grpc.connection_watch import ConnectionWatch
from services.frontend.grpc.field_count import has_more_fields
from services.frontend.grpc.turns import Turns
from services.frontend.loop_share import LoopShare
from services.frontend.request.client_call import ID_HEADER, begin_call
from services.frontend.request.memory_budget import RETRY_AFTER_S, MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals

MAX_MESSAGE_BYTES = 4 * 2**20
"""Largest message, if `max_body_bytes` is not smaller. It is gRPC's own default, and a million
tokens fit. Such a message of nothing but numbers takes 0.04 s to parse."""

MAX_FIELDS = 2**14
"""Fields of a message, those of messages in it included; all turns of the longest conversation
fit, with a call each."""

UNREAD_CALL_BYTES = 12 * 2**10
"""Memory of a call that has ended here and not in gRPC, without its message."""

MAX_UNREAD_CALLS = 8
"""Such calls on one connection, which gets no more until it has fewer."""


WRITES_AT_ONCE, WRITE_S = 4, 5e-4
"""Messages of streams that are written in one pass of the event loop, and the seconds of the last
pass for each, where these are more. gRPC begins one call, and reads one message of the scheduler's,
in two or three passes: neither may wait until every stream has been dealt with. A stream that waits
for its turn joins its tokens meanwhile."""


class Transfers:
    """The messages of all calls, and what they may take together."""

    def __init__(
        self,
        budget: MemoryBudget,
        refusals: Refusals,
        *,
        max_message_bytes: int,
        receive_limit_s: float,
        send_limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.budget = budget
        self.refusals = refusals
        self.receive_limit_s = receive_limit_s
        self.send_limit_s = send_limit_s
        self.n_unread: Counter[str] = Counter()
        """Calls that nobody reads, by the address of their client's connection."""
        self.turns = Turns(max(2, budget.max_bytes // max_message_bytes), refusals)
        self.writes = LoopShare(
            asyncio.get_running_loop(), clock, at_once=WRITES_AT_ONCE, turn_s=WRITE_S
        )
        self.watch = ConnectionWatch(refusals, max_message_bytes=max_message_bytes)

    def exchange(
        self,
        context: Any,
        *,
        uploading: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> "LimitedExchange":
        """Returns the messages of a call, which begins with it; `uploading` is entered while its
        request comes. The call's name goes out before its answers and with its status."""
        # gRPC makes texts of it each time, and takes a call with several megabytes of it.
        received = context.invocation_metadata() or ()
        self.watch.note_call(context.peer(), received)
        metadata = dict(received)
        call = begin_call(metadata.get(ID_HEADER), time_left_s=context.time_remaining())
        shown = ((ID_HEADER, call.shown_id),)
        context.set_trailing_metadata(shown)
        return LimitedExchange(self, context, uploading, metadata=shown)


class LimitedExchange(TimedExchange):
    """The messages of one call, within what all may take together."""

    def __init__(
        self,
        transfers: Transfers,
        context: Any,
        uploading: Callable[[], AbstractContextManager[object]],
        *,
        metadata: Metadata,
    ) -> None:
        super().__init__(
            context,
            metadata=metadata,
            receive_limit_s=transfers.receive_limit_s,
            send_limit_s=transfers.send_limit_s,
        )
        self._transfers = transfers
        self._uploading = uploading
        self._share = transfers.budget.share()
        self._unread_peer: str | None = None

    async def receive(self, request_class: type[Message]) -> Any:
        """Returns the bytes of the call's next request, or gRPC's EOF. A request that has no fields
        is no upload: it needs no place beside its caller's answers.

        Raises:
            InvalidRequest: it has too many fields.
            PoolFull: there is too much at once; its client leaves answers unread.
            TimedOut: it did not come in time.
        """
        transfers = self._transfers
        self._share.close()  # the request before is gone
        if transfers.n_unread and self._context.peer() in transfers.n_unread:
            self._check_unread()
        try:
            with self._uploading() if request_class.DESCRIPTOR.fields else nullcontext():
                turn = transfers.turns.take(self._context.peer())
                async with asyncio.timeout(transfers.receive_limit_s), turn:
                    data = await transfers.watch.read(self._context)
        except TimeoutError:
            transfers.refusals[Refusal.BODY_TIMEOUT] += 1
            raise errors.TimedOut("the request did not come in time") from None
        if data is not grpc.aio.EOF:
            self._share.grow(len(data))
            if has_more_fields(data, request_class, MAX_FIELDS):
                transfers.refusals[Refusal.BODY_TOO_LARGE] += 1
                raise errors.TooLarge("request", f"must not have more than {MAX_FIELDS} fields")
        return data

    async def write(self, message: Any) -> None:
        """Sends an answer when its turn has come; returns when gRPC has sent it, or has room.

        Raises:
            TimedOut: the client did not read in time.
        """
        await self._transfers.writes.turn()
        await super().write(message)

    def hand_over(self, message: Any) -> None:
        """Counts the one answer of a call, which gRPC sends when the call's method has ended.

        Raises:
            PoolFull: there is no memory for it.
        """
        self._share.close()  # the request is gone
        self._share.grow(_n_bytes(message))
        self._timer = LoopTimer(self._send_limit_s, partial(self.note_unread, message))

    def close(self, _: object = None) -> None:
        """Gives back what the messages hold; comes when gRPC has told the client of the end, or
        knows that it is gone."""
        super().close()
        self._share.close()
        if self._unread_peer is not None:
            n_unread = self._transfers.n_unread
            n_unread[self._unread_peer] -= 1
            if not n_unread[self._unread_peer]:
                del n_unread[self._unread_peer]

    def _check_unread(self) -> None:
        transfers = self._transfers
        if transfers.n_unread[self._context.peer()] >= MAX_UNREAD_CALLS:
            transfers.refusals[Refusal.UNREAD] += 1
            raise errors.PoolFull(
                "this connection has too many calls whose answers are not read",
                retry_after_s=RETRY_AFTER_S,
            )

    def note_unread(self, message: Any) -> None:
        """Counts an answer that was not read in time, and stays with gRPC until its client goes."""
        transfers = self._transfers
        transfers.refusals[Refusal.UNREAD] += 1
        self._unread_peer = self._context.peer()
        transfers.n_unread[self._unread_peer] += 1
        self._share.close()  # what it had is gone
        with suppress(errors.PoolFull):  # the answer cannot be taken back
            self._share.grow(_n_bytes(message) + UNREAD_CALL_BYTES)


def _n_bytes(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())
