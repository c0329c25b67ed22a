"""A client's HTTP/1 connection: reads requests within limits, and lets uvicorn write the answers.

Limits are checked before the data of a client costs memory or time: the parser gets small pieces,
and gets nothing more while a request waits for an answer. If a client exceeds a limit, the
connection sends an error and closes. If another answer is being sent, the connection closes without
an error.

uvicorn runs the app for each request and writes the answer, see `request_cycle.py`.
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

from uvicorn.protocols.http.flow_control import FlowControl

from services.frontend.http.transport.connection_limits import ConnectionPlace
from services.frontend.http.transport.connection_refusal import Refused, answer
from services.frontend.http.transport.gathering_transport import GatheringTransport
from services.frontend.http.transport.request_cycle import ends_of
from services.frontend.http.transport.request_parser import RequestParser
from services.frontend.http.transport.request_queue import RequestQueue
from services.frontend.http.transport.server_state import ServerState
from services.frontend.http.transport.unread_output import UnreadOutput
from services.frontend.request.refusals import Refusal

PIECE_BYTES = 4096
"""Largest number of bytes that the parser gets at once. This many bytes hold at most 150
requests."""

MAX_AHEAD_BYTES = 64 * 2**10
"""Number of bytes that a client may send before the answer to an earlier request is complete. If
the client sends more, reading from the connection is paused."""

AHEAD_S = 0.001
"""Seconds between the end of an answer and the parsing of the next request, if the client has sent
this request ahead. The delay keeps thousands of requests sent ahead from keeping the event loop
busy."""

LARGE_READ_BYTES = 16 * 2**10
"""Size of a read, in bytes, above which other connections are read before the same connection is
read again."""

PARSE_S = 0.001
"""Seconds of parsing after which other connections are handled before parsing continues. Chunks of
one byte each take a hundred times as long to parse as one large chunk."""

MAX_DROPPED_BYTES = 2**20
"""Number of bytes that are read and dropped after a refusal. If the client sends more, reading from
the connection is paused."""

GOODBYE_S = 1.0
"""Seconds that a client has to read a refusal, or to answer the TLS close notification. Must be
less than `server.FINISH_S`."""


class HttpConnection(asyncio.Protocol):
    """A client's HTTP/1 connection. It is refused or closed when the client exceeds a limit of
    size, time or number."""

    def __init__(self, server: ServerState, place: ConnectionPlace | None) -> None:
        """Prepares a connection. `place` is None if all places for connections are taken."""
        self._server = server
        self._limits = server.limits
        self._refusals = server.refusals
        self._shares = server.shares
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._ahead = bytearray()  # received, not parsed yet
        self._is_ahead_paused = False
        self._waits_to_parse = False
        self._is_over = False  # refused or lost: no more is parsed
        self._n_dropped = 0  # bytes received since the connection is over
        self._unread: UnreadOutput | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: Callable[[], None] | None = None

    # Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to read from a new connection. A connection without a place is refused."""
        self._transport = GatheringTransport(
            transport, self._server.writes, self._shares.reads, on_close=self._closing
        )
        self._flow = FlowControl(self._transport)
        self._requests = RequestQueue(
            self._server,
            self._transport,
            self._flow,
            ends=ends_of(transport),
            place=self._place,
            on_answered=self._read_ahead,
        )
        self._parser = RequestParser(self._limits, self._requests)
        self._incoming = self._parser.incoming
        self._unread = UnreadOutput(
            self._transport,
            self._loop,
            limit_s=self._limits.send_limit_s,
            budget=self._server.budget,
            refusals=self._refusals,
        )
        self._server.connections.add(self)
        if self._place is not None:
            self._place.abort = self._transport.abort
        else:
            self._place = self._server.places.stand(self._transport.abort)
            self._end(HTTPStatus.SERVICE_UNAVAILABLE, "there are too many connections")
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the requests and timers of the connection. Called when the connection is lost."""
        self._is_over = True
        self._ahead.clear()
        self._await(None)
        if self._unread is not None:
            self._unread.close()
        if self._place is not None:
            self._place.leave()
        if self._requests.disconnect():
            self._shares.requests.take(self._end_request)
        else:
            self._end_request()

    def _end_request(self) -> None:
        """Ends the request that is being answered, if any, and removes the lost connection from the
        server."""
        self._requests.end_current()
        self._flow.resume_writing()  # for an app that waits to write
        self._server.end_connection(self)
        self._break_cycles()

    def _break_cycles(self) -> None:
        """Deletes references from and to this connection that form cycles, so that the memory of
        the connection is freed at once. Otherwise the garbage collector would have to find the
        cycles, and all streams would wait meanwhile."""
        self._place = self._unread = None
        self._requests.clear()
        self._parser.close()
        self._transport.detach()

    def pause_writing(self) -> None:
        """Pauses the app's writing and begins to watch the unread output. Called when the client
        does not read fast enough."""
        self._flow.pause_writing()
        if self._unread is not None:
            self._unread.begin()

    def resume_writing(self) -> None:
        """Resumes the app's writing. Called when the client has read most of the output."""
        self._flow.resume_writing()
        if self._unread is not None:
            self._unread.end()

    def finish(self) -> None:
        """Closes the connection at once if it is idle, or else after the current answer. To close
        TLS, each side sends a close notification. A client that keeps an idle connection in a pool
        does not read the notification and sends none. The client's notification is therefore
        awaited for GOODBYE_S only."""
        if (cycle := self._requests.last) is None:
            self._transport.close()
        else:
            cycle.keep_alive = False
        if self._transport.is_closing():
            self._loop.call_later(GOODBYE_S, self._say_goodbye)

    def _say_goodbye(self) -> None:
        """Aborts the connection if all output has been sent. Otherwise the connection stays open
        while the rest is sent, for which `UnreadOutput` limits the time."""
        if not self._transport.get_write_buffer_size():
            self._transport.abort()

    def _closing(self) -> None:
        if self._unread is not None:
            self._unread.closing()

    # Data from the client

    def data_received(self, data: bytes) -> None:
        """Parses received data. While a request is being answered, the data is kept for later."""
        if self._is_over:
            self._drop(data)
            return
        if not self._ahead and len(data) <= PIECE_BYTES and not self._is_answering:
            self._parse(data)  # the usual case
        else:
            self._ahead += data
            self._parse_ahead()
            if len(data) > LARGE_READ_BYTES and not self._flow.read_paused:
                self._let_others_read()
        self._watch_client()

    def _let_others_read(self) -> None:
        """Pauses reading until `LoopShares.reads` allows it again, so that other connections are
        read first."""
        if not self._is_ahead_paused:
            self._transport.pause_reading()
            self._transport.resume_reading()

    def _drop(self, data: bytes) -> None:
        """Drops data that is received after a refusal. The data must be read from the socket,
        because some clients read the answer only after they have sent everything."""
        self._n_dropped += len(data)
        if self._n_dropped > MAX_DROPPED_BYTES:
            self._transport.pause_reading()
        else:
            self._let_others_read()

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request has been received whose answer is not complete."""
        return not self._incoming.is_in_body and self._requests.last is not None

    @property
    def _is_idle(self) -> bool:
        """Whether the last request is answered, and nothing of a next request has been received."""
        is_answered = not self._requests.is_empty and self._requests.last is None
        return is_answered and not (self._incoming.has_begun or self._ahead)

    def _parse_ahead(self) -> None:
        until_s = time.perf_counter() + PARSE_S
        while self._ahead and not self._is_answering and not self._is_over:
            piece = bytes(self._ahead[:PIECE_BYTES])
            del self._ahead[:PIECE_BYTES]
            self._parse(piece)
            if time.perf_counter() > until_s:
                self._parse_later()
                break
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self._is_ahead_paused = True
            self._transport.pause_reading()
        elif self._is_ahead_paused:
            self._is_ahead_paused = False
            if not self._flow.read_paused:  # else reading resumes once the app has read the body
                self._transport.resume_reading()

    def _parse_later(self) -> None:
        """Schedules further parsing for the time when `LoopShares.reads` allows it, unless parsing
        is scheduled already."""
        if not self._waits_to_parse:
            self._waits_to_parse = True
            self._loop.call_soon(self._shares.reads.take, self._parse_in_turn)

    def _parse_in_turn(self) -> None:
        self._waits_to_parse = False
        self._go_on()

    def _go_on(self) -> None:
        if self._ahead and not self._is_over:
            self._parse_ahead()
            self._watch_client()

    def _parse(self, piece: bytes) -> None:
        try:
            self._parser.feed(piece)
        except Refused as refused:
            self._refuse(refused)

    def _read_ahead(self) -> None:
        """Schedules the parsing of data that the client sent ahead. Called when all requests are
        answered."""
        if self._ahead:
            self._loop.call_later(AHEAD_S, self._go_on)
        self._watch_client()

    # Limits

    def _watch_client(self) -> None:
        """Limits the time for the next data that the client has to send: a new request, the rest of
        a head, or the rest of the body of a request that has been answered already. If the client
        has to send nothing, there is no limit."""
        if self._is_over:
            return
        if self._incoming.is_in_body:
            if self._requests.last is None:
                self._await(self._miss_body, self._limits.body_limit_s)
            else:
                self._await(None)
        elif self._is_idle:
            self._await(self._transport.close, self._limits.idle_limit_s)
        elif not self._is_answering and (self._incoming.has_begun or self._requests.is_empty):
            self._await(self._miss_head, self._limits.head_limit_s)
        else:
            self._await(None)

    def _await(self, then: Callable[[], None] | None, limit_s: float = 0.0) -> None:
        """Calls `then` in `limit_s` seconds, in place of an earlier callback. If `then` is already
        scheduled, its time is not changed. If `then` is None, only cancels the earlier callback."""
        if then == self._awaited:
            return
        self._awaited = then
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if then is not None:
            self._timer = self._loop.call_later(limit_s, then)

    def _miss_head(self) -> None:
        self._refuse(
            Refused(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request line and headers did not come in {self._limits.head_limit_s:g} s",
                Refusal.HEAD_TIMEOUT,
            )
        )

    def _miss_body(self) -> None:
        self._refusals[Refusal.BODY_TIMEOUT] += 1
        self._transport.abort()

    def _refuse(self, refused: Refused) -> None:
        """Ends the connection because the client has exceeded a limit or broken a rule. The refusal
        is sent as an answer, unless another answer has begun or must come first. In that case no
        refusal is sent: the connection closes after the other answer or, if the error is in the
        middle of a body, at once."""
        self._is_over = True
        self._refusals[refused.reason] += 1
        cycle = self._requests.last
        if self._incoming.is_in_body:
            if cycle is None or self._requests.has_waiting or cycle.response_started:
                self._transport.abort()
            else:
                self._end(refused.status, refused.message)
                cycle.disconnected = True  # the rest of the body will never come
                self._requests.end_current()
        elif cycle is None:
            self._end(refused.status, refused.message)
        else:  # the refused data was sent ahead of an answer
            cycle.keep_alive = False

    def _end(self, status: HTTPStatus, message: str) -> None:
        """Sends an answer and closes the connection. A client that is still sending could not read
        the answer if the connection were closed at once. So its data is read for up to GOODBYE_S,
        unless the connection uses TLS or has no place."""
        self._is_over = True
        self._ahead.clear()
        self._await(None)
        self._transport.write(answer(status, message))
        if self._transport.can_write_eof() and self._place is not None:
            self._place.set_waiting()
            self._transport.write_eof()
            self._loop.call_later(GOODBYE_S, self._transport.abort)
        else:
            self._transport.close()
