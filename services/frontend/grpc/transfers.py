"""Receives and sends the messages of all gRPC calls of this process in bounded memory.

gRPC passes on only whole messages, and reports nothing about a message before it is complete. For
each call whose message is being read, gRPC may hold the bytes of the largest message. So only a few
calls may receive at a time. A call that receives must have a turn (`turns.py`). The other calls
wait, and clients with few waiting calls get the next turns. Small messages arrive during the wait,
so their turns take almost no time. A call that has received for a second loses its turn to a
waiting call; so a slow client with a large message is served as long as no other call waits.

An answer that its client does not read cannot be taken back from gRPC. The bytes of the answer stay
counted until the client reads it or disconnects, and a connection with several such answers gets no
further calls.
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
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals

MAX_MESSAGE_BYTES = 4 * 2**20
"""Size of the largest message in bytes, unless `max_body_bytes` is smaller. This is the default of
gRPC, and a million tokens fit. Parsing a message of this size that holds only numbers takes 0.04
s."""

MAX_FIELDS = 2**14
"""Largest number of fields in a message, including the fields of nested messages. The longest
conversation fits, with a tool call in each turn."""

UNREAD_CALL_BYTES = 12 * 2**10
"""Bytes of memory that a call takes, besides its message, after its end in this process and before
its end in gRPC."""

MAX_UNREAD_CALLS = 8
"""Largest number of calls of one connection whose answers the client has not read. At this number,
the connection gets no further call until the client reads an answer."""


WRITES_AT_ONCE, WRITE_S = 4, 5e-4
"""Number of stream messages that one pass of the event loop may write: `WRITES_AT_ONCE`, or the
duration of the previous pass divided by `WRITE_S` seconds, whichever is larger.

gRPC needs two or three passes to begin a call, or to read a message of the scheduler. Calls and
scheduler messages must not wait until every stream has been written to. Tokens that come while
their stream waits for its turn are sent in one message.
"""


class Transfers:
    """The state that all gRPC calls of this process share: the memory budget for clients' data, the
    timeouts for receiving and sending messages, and the limits on how many calls at a time may
    receive a request or write an answer."""

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
        """Number of calls whose answers are not read, keyed by the address of the connection."""
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
        """Begins a call, and returns the object that receives and sends its messages. A request
        that may hold a prompt or tokens is received within the context that `uploading` returns.
        The id of the call is sent before the answers and again with the status."""
        # Read only once: gRPC decodes all metadata at each read, and a call may have megabytes.
        received = context.invocation_metadata() or ()
        self.watch.note_call(context.peer(), received)
        metadata = dict(received)
        call = begin_call(metadata.get(ID_HEADER), time_left_s=context.time_remaining())
        shown = ((ID_HEADER, call.shown_id),)
        context.set_trailing_metadata(shown)
        return LimitedExchange(self, context, uploading, metadata=shown)


class LimitedExchange(TimedExchange):
    """Receives and sends the messages of one call, within the limits that all calls share."""

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
        """Returns the bytes of the call's next request, or gRPC's EOF. While a request that can
        hold a prompt or tokens is received, it counts as one answer in flight of its API key.

        Raises:
            TooLarge: the request has more than MAX_FIELDS fields.
            PoolFull: too many messages are being received, the memory budget or the limit of the
            API key is used up, or the client leaves answers unread.
            TimedOut: the request did not arrive within `receive_limit_s`.
        """
        transfers = self._transfers
        self._share.close()  # the request before this one is no longer held
        if transfers.n_unread and self._context.peer() in transfers.n_unread:
            self._check_unread()
        try:
            with self._uploading() if _holds_prompt(request_class) else nullcontext():
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
        """Sends a message of a stream as soon as the event loop's share of writes allows it.
        Returns when gRPC has sent the message, or has room for the next.

        Raises:
            TimedOut: the client did not read within `send_limit_s`.
        """
        await self._transfers.writes.turn()
        await super().write(message)

    def hand_over(self, message: Any) -> None:
        """Counts the memory of the response of a unary call. gRPC sends the response after the RPC
        method has returned. If it cannot send the response within `send_limit_s`, the call counts
        as unread.

        Raises:
            PoolFull: the memory budget has no room for the response.
        """
        self._share.close()  # the request is no longer held
        self._share.grow(_n_bytes(message))
        self._timer = LoopTimer(self._send_limit_s, partial(self.note_unread, message))

    def close(self, _: object = None) -> None:
        """Releases the memory that the messages hold. Must be called when gRPC has sent the end of
        the call to the client, or when the client has disconnected."""
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
            raise errors.PoolFull("this connection has too many calls whose answers are not read")

    def note_unread(self, message: Any) -> None:
        """Counts an answer that the client did not read within the time limit. gRPC keeps such an
        answer until the client reads it or disconnects."""
        transfers = self._transfers
        transfers.refusals[Refusal.UNREAD] += 1
        self._unread_peer = self._context.peer()
        transfers.n_unread[self._unread_peer] += 1
        self._share.close()  # the share of the message before it was unread
        with suppress(errors.PoolFull):  # the answer cannot be taken back
            self._share.grow(_n_bytes(message) + UNREAD_CALL_BYTES)


def _n_bytes(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())


def _holds_prompt(request_class: type[Message]) -> bool:
    """Returns whether requests of the class `request_class` may hold a prompt or tokens, and not
    only names."""
    return any(
        field.is_repeated or field.message_type is not None
        for field in request_class.DESCRIPTOR.fields
    )
