"""The requests of one connection, which are answered one after the other, each in its turn.

A client may send requests ahead (HTTP calls it pipelining). All that came in one piece with a
request wait here until that request is answered; its connection reads no further meanwhile.
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
    """The requests of one connection. Its parser calls `begin`, `add_body` and `end`."""

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
        """Prepares for requests over a connection with these ends, see `ends_of`. `on_answered` is
        called when all requests that have come are answered."""
        self._server = server
        self._transport = transport
        self._flow = flow
        self._ends = ends
        self._place = place
        self._on_answered = on_answered
        self._loop = asyncio.get_running_loop()
        self._last: RequestResponseCycle | None = None  # of the request that came last
        self._current: RequestResponseCycle | None = None  # of the request that is answered now
        self._waiting: deque[RequestResponseCycle] = deque()  # of the requests that came after it
        self._chunks: ChunkWriter | None = None  # of the answer to the current request

    @property
    def is_empty(self) -> bool:
        """Whether no request has come yet."""
        return self._last is None

    @property
    def last(self) -> RequestResponseCycle | None:
        """The request that came last, in whole or in part, unless its answer is complete."""
        return None if self._last is None or self._last.response_complete else self._last

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for the answer to another."""
        return bool(self._waiting)

    # What the parser finds

    def begin(self, head: RequestHead) -> None:
        """Begins to answer a request, or has it wait for the answers to those before it."""
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
        """Gives the app more of the last request's body; drops it if the answer is complete."""
        if (cycle := self.last) is not None:
            cycle.body += data
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self._flow.pause_reading()
            cycle.message_event.set()

    def end(self) -> None:
        """Tells the app that the last request's body has come as a whole."""
        if (cycle := self.last) is not None:
            cycle.more_body = False
            cycle.message_event.set()

    # Answers

    def _answer(self, cycle: RequestResponseCycle) -> None:
        """Has the app answer a request in its turn."""
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
        if not cycle.disconnected:  # while it waited for its turn
            task = self._loop.create_task(cycle.run_asgi(app))  # type: ignore[arg-type]
            self._server.tasks.add(task)
            task.add_done_callback(self._server.end_task)

    def _go_on(self) -> None:
        """Goes on with the next request once an answer is complete."""
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
        """Has nothing more written for the current request; returns False if there is none."""
        if self._current is None or self._current.response_complete:
            return False
        self._current.disconnected = True
        return True

    def end_current(self) -> None:
        """Tells the app that nothing more of the current request comes, nor is its answer read."""
        if self._current is not None:
            self._current.message_event.set()
        if self._chunks is not None:
            self._chunks.note_loss()

    def clear(self) -> None:
        """Lets go of all requests, and of their connection; called once, when that is lost."""
        self._last = self._current = self._chunks = self._place = None
        self._waiting.clear()
        del self._on_answered
