"""A client's HTTP/1 connection: uvicorn's, with a guard in front of its parser.

uvicorn takes heads of any size and any number of headers, at any pace, and as many requests ahead
as a client sends. The guard bounds all of that before it costs anything: it feeds the parser small
pieces, counts what these add to the head or body in the making, and feeds no more while a request
waits for its answer. What breaks a limit is answered, if nothing else is being answered, and the
connection ends.

Two more things are put right. An `Upgrade` to anything is ignored, as HTTP allows: the parser is
given the head again without it, since it would take the body for the other protocol's. And an
HTTP/1.0 client gets no chunks: the end of the connection ends its answer.
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.frontend.http.transport.chunk_writer import ChunkWriter
from services.frontend.http.transport.connection_limits import ConnectionLimits, Place, Places
from services.frontend.http.transport.connection_refusal import Refused, answer, malformed
from services.frontend.http.transport.gathering_transport import GatheringTransport, WriteRound
from services.frontend.http.transport.incoming_request import IncomingRequest
from services.frontend.http.transport.loop_shares import LoopShares
from services.frontend.http.transport.unread_output import UnreadOutput
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals

PIECE_BYTES = 4096
"""Bytes that the parser gets at once: no more than 150 requests are in them."""

MAX_AHEAD_BYTES = 64 * 2**10
"""Bytes that a client may send ahead of an answer; then it is no longer read from."""

AHEAD_S = 0.001
"""Seconds between an answer and a request that was sent ahead of it, so that thousands of them do
not keep the loop busy."""

LARGE_READ_BYTES = 16 * 2**10
"""Bytes that come at once, after which others have their turn before more are read."""

PARSE_S = 0.001
"""Seconds after which a connection lets others have their turn before it parses on: chunks of a
byte each take a hundred times as long as one large one."""

MAX_DROPPED_BYTES = 2**20
"""Bytes that are read, and dropped, after a refusal; then the client must wait, or read."""

GOODBYE_S = 1.0
"""Seconds that a client has to take a refusal, or the goodbye of TLS; less than
`server.FINISH_S`."""

WITHOUT_BODY = frozenset({"GET", "HEAD"})
"""Methods of requests that have no body."""

UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})


class Connection(HttpToolsProtocol):
    """A client's connection, within limits."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        *,
        limits: ConnectionLimits,
        places: Places,
        budget: MemoryBudget,
        refusals: Refusals,
        writes: WriteRound,
        shares: LoopShares,
        place: Place | None,
    ) -> None:
        super().__init__(config, server_state, {}, asyncio.get_running_loop())
        self._limits = limits
        self._places = places
        self._budget = budget
        self._refusals = refusals
        self._writes = writes
        self._shares = shares
        self._place = place
        self._unread: UnreadOutput | None = None
        self._ahead = bytearray()  # what came and is not parsed yet
        self._is_ahead_paused = False
        self._waits_to_parse = False
        self._is_over = False  # refused: nothing is parsed any more
        self._n_dropped = 0  # bytes that came after that
        self._incoming = IncomingRequest(limits)
        self._current: RequestResponseCycle | None = None  # being answered; `cycle` came last
        self._chunks: ChunkWriter | None = None  # of its answer
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: Callable[[], None] | None = None

    # Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wraps the transport of a new connection, if there is a place for it."""
        gathering = GatheringTransport(
            transport, self._writes, self._shares.reads, on_close=self._closing
        )
        super().connection_made(gathering)
        self._unread = UnreadOutput(
            gathering,
            self.loop,
            limit_s=self._limits.send_limit_s,
            budget=self._budget,
            refusals=self._refusals,
        )
        if self._place is not None:
            self._place.abort = self.transport.abort
        else:
            self._place = self._places.stand(self.transport.abort)
            self._end(HTTPStatus.SERVICE_UNAVAILABLE, "there are too many connections")
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what waits for the client."""
        self._unset_keepalive_if_required()
        self._is_over = True
        self._ahead.clear()
        self._await(None)
        if self._unread is not None:
            self._unread.close()
        if self._place is not None:
            self._place.leave()
        if self._current is not None and not self._current.response_complete:
            self._current.disconnected = True  # nothing is written any more
            self._shares.requests.take(lambda: self._end_request(exc))
        else:
            self._end_request(exc)

    def _end_request(self, exc: Exception | None) -> None:
        """Ends the request that is being answered, if there is one."""
        if self._current is not None:
            self._end_reading(self._current)
        super().connection_lost(exc)
        self._break_cycles()

    def _end_reading(self, cycle: RequestResponseCycle) -> None:
        """Tells whoever answers a request that nothing more of it comes, nor is read."""
        cycle.message_event.set()
        if self._chunks is not None:
            self._chunks.note_loss()

    def _break_cycles(self) -> None:
        """Lets go of what refers back to this connection, whose memory is then free at once. A
        garbage collector that finds it later holds up every stream meanwhile."""
        self.cycle = self._current = None  # type: ignore[assignment]
        self.pipeline.clear()
        self._place = self._unread = self._chunks = None
        if isinstance(self.transport, GatheringTransport):
            self.transport.detach()

    def pause_writing(self) -> None:
        """Notes that the client does not keep up."""
        super().pause_writing()
        if self._unread is not None:
            self._unread.begin()

    def resume_writing(self) -> None:
        """Notes that the client has caught up."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.end()

    def shutdown(self) -> None:
        """Closes the connection if it is idle, else closes it with its answer. Over TLS, an end
        needs a goodbye from both sides, and a client that keeps an idle connection in a pool does
        not look at it: such a connection is not waited for."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(GOODBYE_S, self._say_goodbye)

    def _say_goodbye(self) -> None:
        """Ends a connection that has nothing more to send; one that has is `UnreadOutput`'s."""
        if not self.transport.get_write_buffer_size():
            self.transport.abort()

    def _closing(self) -> None:
        if self._unread is not None:
            self._unread.closing()

    # What comes from the client

    def data_received(self, data: bytes) -> None:
        """Parses what comes, as far as it is time for it."""
        if self._is_over:
            self._drop(data)
            return
        self._unset_keepalive_if_required()
        if not self._ahead and len(data) <= PIECE_BYTES and not self._is_answering:
            self._parse(data)  # nearly always
        else:
            self._ahead += data
            self._parse_ahead()
            if len(data) > LARGE_READ_BYTES and not self.flow.read_paused:
                self._let_others_read()
        self._watch_client()

    def _let_others_read(self) -> None:
        """Reads on in its next turn."""
        if not self._is_ahead_paused:
            self.transport.pause_reading()
            self.transport.resume_reading()

    def _drop(self, data: bytes) -> None:
        """Drops what comes after a refusal, for a client that reads only when it has sent all."""
        self._n_dropped += len(data)
        if self._n_dropped > MAX_DROPPED_BYTES:
            self.transport.pause_reading()
        else:
            self._let_others_read()

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request has come and its answer is not complete."""
        return (
            not self._incoming.is_in_body
            and self.cycle is not None
            and not self.cycle.response_complete
        )

    @property
    def _is_idle(self) -> bool:
        """Whether the last request is answered, and nothing of the next one has come."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and not (self._incoming.has_begun or self._ahead or self.pipeline)

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
            self.transport.pause_reading()
        elif self._is_ahead_paused:
            self._is_ahead_paused = False
            if not self.flow.read_paused:  # else once somebody has read the body
                self.transport.resume_reading()

    def _parse_later(self) -> None:
        """Goes on in the next turn. There is no second turn while one waits."""
        if not self._waits_to_parse:
            self._waits_to_parse = True
            self.loop.call_soon(self._shares.reads.take, self._parse_in_turn)

    def _parse_in_turn(self) -> None:
        self._waits_to_parse = False
        self._go_on()

    def _parse(self, piece: bytes) -> None:
        try:
            while piece:
                piece = self._feed(piece)
        except Refused as refused:
            self._refuse(refused)

    def _feed(self, piece: bytes) -> bytes:
        """Feeds the parser, and returns what is to be fed to it next.

        Raises:
            Refused: it breaks a limit or a rule.
        """
        mark = self._incoming.mark()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + piece[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, Refused):
                raise error.__context__ from None
            raise malformed("this is not HTTP/1.1") from None
        self._incoming.add_piece(len(piece), since=mark)
        return b""

    def _without_upgrade(self) -> bytes:
        """Returns the head that has just been parsed, without its upgrade, for a new parser."""
        version = self.parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if _is_kept(token.lower()))
            if name not in UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._incoming.begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._incoming.add_url(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._incoming.is_in_body:  # a trailer; nobody asks for one
            return
        super().on_header(name, value)
        self._incoming.add_header(name, value, n_headers=len(self.headers))

    def on_headers_complete(self) -> None:
        self._incoming.check_head(self.parser.get_http_version())
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise malformed("this is no proxy")
            return  # it comes again
        super().on_headers_complete()
        self._incoming.begin_body()
        if self._place is not None:
            self._place.set_busy()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._incoming.add_body(len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._incoming.end()

    def on_response_complete(self) -> None:
        """Goes on with what the client has sent ahead."""
        super().on_response_complete()
        if self.pipeline or not self.cycle.response_complete or self.transport.is_closing():
            return
        if self._place is not None:
            self._place.set_waiting()
        if self._ahead:
            self.loop.call_later(AHEAD_S, self._go_on)
        self._watch_client()

    def _go_on(self) -> None:
        if self._ahead and not self._is_over:
            self._unset_keepalive_if_required()
            self._parse_ahead()
            self._watch_client()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        else:
            self._chunks = ChunkWriter(self.transport, self.flow, self.loop)
            self._chunks.offer(cycle.scope)
        self._current = cycle
        share = self._shares.requests
        if cycle.scope["method"] in WITHOUT_BODY:
            share = self._shares.lookups
        share.take(lambda: self._start(cycle, app))

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not cycle.disconnected:  # while it waited for its turn
            super()._start_asgi_task(cycle, app)

    # Limits

    def _watch_client(self) -> None:
        """Sets the timer for what the client has to send next, if anything: a request on a new
        connection, the rest of a head, or of a body that has been answered already."""
        if self._is_over:
            return
        if self._incoming.is_in_body:
            self._await(self._miss_body if self.cycle.response_complete else None)
        elif self._is_idle:  # answered before its body had ended
            self._await(None)
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif not self._is_answering and (self._incoming.has_begun or self.cycle is None):
            self._await(self._miss_head)
        else:
            self._await(None)

    def _await(self, then: Callable[[], None] | None) -> None:
        if then == self._awaited:
            return
        self._awaited = then
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if then is not None:
            is_head = then == self._miss_head
            limit_s = self._limits.head_limit_s if is_head else self._limits.body_limit_s
            self._timer = self.loop.call_later(limit_s, then)

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
        self.transport.abort()

    def _refuse(self, refused: Refused) -> None:
        """Ends the connection: with an answer, if none is being given, else after that."""
        self._refusals[refused.reason] += 1
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if not self._incoming.is_in_body and not is_answering:
            self._end(refused.status, refused.message)
        elif not self._incoming.is_in_body:  # the client has sent it ahead
            self._is_over = True
            cycle.keep_alive = False
        elif not is_answering or self.pipeline or cycle.response_started:
            self.transport.abort()
        else:
            self._end(refused.status, refused.message)
            cycle.disconnected = True  # for its reader: the rest of the body will never come
            self._end_reading(cycle)

    def _end(self, status: HTTPStatus, message: str) -> None:
        """Answers and closes. A client that is still sending would lose the answer if its
        connection were closed at once: it is read from a little longer."""
        self._is_over = True
        self._ahead.clear()
        self._await(None)
        self.transport.write(answer(status, message))
        if self.transport.can_write_eof() and self._place is not None:
            self._place.set_waiting()
            self.transport.write_eof()
            self.loop.call_later(GOODBYE_S, self.transport.abort)
        else:
            self.transport.close()


def _is_kept(connection_token: bytes) -> bool:
    return connection_token != b"upgrade" and connection_token not in UPGRADE_HEADERS


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> ASGIApp:
    """Returns the app with answers that nothing frames unless they have a length."""

    async def unframed(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                cycle.chunked_encoding = None if b"content-length" in names else False
            elif cycle.chunked_encoding is False and cycle.expected_content_length == 0:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_on)

    return unframed
