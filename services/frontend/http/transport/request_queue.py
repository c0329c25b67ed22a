"""The requests of one connection, which are answered one after the other.

A client may send requests before an earlier answer is complete (pipelining in HTTP). If one piece
of data brings several requests, the later ones wait here until the earlier ones are answered.
Meanwhile the connection parses no more data.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.frontend.http.transport.chunk_writer import ChunkWriter
from services.frontend.http.transport.connection_limits import ConnectionPlace
from services.frontend.http.transport.request_cycle import new_cycle, without_chunks
from services.frontend.http.transport.request_parser import RequestHead
from services.frontend.http.transport.server_state import ServerState

WITHOUT_BODY = frozenset({"GET", "HEAD"})
"""Methods of requests that have no body."""


class RequestQueue:
    """Keeps the requests of one connection, and answers one after the other. The connection's
    parser calls `begin`, `add_body` and `end`."""

    def __init__(
        self,
        server: ServerState,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        ends: Scope,
        place: ConnectionPlace | None,
        on_answered: Callable[[], None],
    ) -> None:
        """Prepares to receive the requests of a connection. `ends` is the result of `ends_of` for
        the connection. `on_answered` is called when all received requests are answered."""
        self._server = server
        self._transport = transport
        self._flow = flow
        self._ends = ends
        self._place = place
        self._on_answered = on_answered
        self._loop = asyncio.get_running_loop()
        self._last: RequestResponseCycle | None = None  # cycle of the last request
        self._current: RequestResponseCycle | None = None  # cycle of the request being answered
        self._waiting: deque[RequestResponseCycle] = deque()  # cycles of later requests
        self._chunks: ChunkWriter | None = None  # of the answer to the current request

    @property
    def is_empty(self) -> bool:
        """Whether no request has been received yet."""
        return self._last is None

    @property
    def last(self) -> RequestResponseCycle | None:
        """The last request and its answer, as uvicorn's `RequestResponseCycle`. The request may
        have been received only in part. None if the answer is complete, or if there has been no
        request."""
        return None if self._last is None or self._last.response_complete else self._last

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits until an earlier request is answered."""
        return bool(self._waiting)

    # Called by the parser

    def begin(self, head: RequestHead) -> None:
        """Begins to answer a request. If earlier requests are not answered yet, the request
        waits."""
        cycle = new_cycle(
            head, self._ends, transport=self._transport, flow=self._flow, on_response=self._go_on
        )
        before, self._last = self.last, cycle
        if before is None:
            self._answer(cycle)
        else:
            self._flow.pause_reading()
            self._waiting.append(cycle)
        if self._place is not None:
            self._place.set_busy()

    def add_body(self, data: bytes) -> None:
        """Passes bytes of the last request's body to the app. If the answer is already complete,
        the bytes are dropped."""
        if (cycle := self.last) is not None:
            cycle.body += data
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self._flow.pause_reading()
            cycle.message_event.set()

    def end(self) -> None:
        """Signals to the app that the last request's body has been received completely."""
        if (cycle := self.last) is not None:
            cycle.more_body = False
            cycle.message_event.set()

    # Answers

    def _answer(self, cycle: RequestResponseCycle) -> None:
        """Schedules the answer of the app to a request. The app begins when a share of the event
        loop allows it: `LoopShares.lookups` for requests without a body, else
        `LoopShares.requests`."""
        app = self._server.app
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        else:
            self._chunks = ChunkWriter(self._transport, self._flow, self._loop)
            cycle.scope["extensions"] = self._chunks.extension()
        self._current = cycle
        share = self._server.shares.requests
        if cycle.scope["method"] in WITHOUT_BODY:
            share = self._server.shares.lookups
        share.take(lambda: self._start(cycle, app))

    def _start(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        if not cycle.disconnected:  # the client may have disconnected before the turn
            task = self._loop.create_task(cycle.run_asgi(app))  # type: ignore[arg-type]
            self._server.tasks.add(task)
            task.add_done_callback(self._server.end_task)

    def _go_on(self) -> None:
        """Begins to answer the next request of the queue, or calls `on_answered` if there is none.
        Called when the current answer is complete. Does nothing if the connection is closing."""
        if self._transport.is_closing():
            return
        self._flow.resume_reading()
        if self._waiting:
            self._answer(self._waiting.popleft())
        else:
            if self._place is not None:
                self._place.set_waiting()
            self._on_answered()

    # The end of the connection

    def disconnect(self) -> bool:
        """Marks the client of the current request as disconnected, so that nothing more is written
        to the client. Returns False if no request is being answered."""
        if self._current is None or self._current.response_complete:
            return False
        self._current.disconnected = True
        return True

    def end_current(self) -> None:
        """Signals to the app that the client has disconnected: no more of the request will arrive,
        and the client does not read the answer."""
        if self._current is not None:
            self._current.message_event.set()
        if self._chunks is not None:
            self._chunks.note_loss()

    def clear(self) -> None:
        """Deletes all requests and the references to the connection. Called once, when the
        connection is lost."""
        self._last = self._current = self._chunks = self._place = None
        self._waiting.clear()
        del self._on_answered
