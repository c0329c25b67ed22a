"""Connections of clients that keep to no limit: raw sockets against a server in this process."""

import asyncio
import gc
import json
import os
import re
import resource
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.common.address import listen
from services.frontend.http.transport import connection as connection_module
from services.frontend.http.transport import loop_shares as loop_shares_module
from services.frontend.http.transport.connection import MAX_AHEAD_BYTES, MAX_DROPPED_BYTES
from services.frontend.http.transport.connection_limits import (
    RESERVED_DESCRIPTORS,
    ConnectionLimits,
    check_descriptors,
)
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import Event, EventStream, framed
from services.frontend.http.transport.incoming_request import MAX_FRAMING_BYTES
from services.frontend.http.transport.server import HttpServer
from services.frontend.loop_share import MIN_AT_ONCE, LoopShare
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals
from tests.limits import HANG_S

LIMITS: dict[str, Any] = {"max_head_bytes": 4000, "max_headers": 10}

HOST = b"Host: x\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"


N_EVENTS = 2000


def event_of(number: int) -> Event:
    return framed(b"%d " % number + b"x" * 2000)


EVENTS = b"".join(event_of(number) for number in range(N_EVENTS))


class App:
    """Echoes bodies, with the protocol's version; `/stream` gives one without a length, `/big` what
    nobody reads, `/events` a stream of which two events in three go past the app where they may,
    `/wait` waits for an event, `/read-late` for another before it reads."""

    def __init__(self) -> None:
        self.n_requests = 0
        self.n_disconnects = 0
        self.go_on = asyncio.Event()
        self.read_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.n_requests += 1
        request = Request(scope, receive)
        response: Any = PlainTextResponse("not read")
        match scope["path"]:
            case "/stream":
                response = StreamingResponse(self._pieces(b"piece,", 3))
            case "/events":
                response = EventStream(self._write, explain=lambda error: b"", comment_s=60.0)
            case "/silent" | "/silent-unread":
                response = await self._silence(request)
            case "/big":
                response = StreamingResponse(self._pieces(bytes(10_000), 10_000))
            case "/wait":
                if not await self._waits_to_go_on(receive):
                    return
            case "/unread":
                pass
            case path:
                if path == "/read-late":
                    await self.read_on.wait()
                body = await request.body()
                response = PlainTextResponse(f"{scope['http_version']} {len(body)} bytes")
        try:
            await response(scope, receive, send)
        except OSError:
            self.n_disconnects += 1

    async def _waits_to_go_on(self, receive: Receive) -> bool:
        """Returns whether the client is there when the event comes."""
        waiting = asyncio.ensure_future(self.go_on.wait())
        leaving = asyncio.ensure_future(receive())
        while not waiting.done():
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and leaving.result()["type"] == "http.disconnect":
                self.n_disconnects += 1
                waiting.cancel()
                return False
            if leaving.done():
                leaving = asyncio.ensure_future(receive())
        leaving.cancel()
        return True

    async def _write(self, output: EventOutput) -> None:
        await output.start()
        for number in range(N_EVENTS):
            event, chunks = event_of(number), output.chunks
            if number % 3 and chunks is not None and chunks.is_ready:
                chunks.write(event)
            else:
                await output.write(event)
            if number % 50 == 0:
                await asyncio.sleep(0)

    async def _silence(self, request: Request) -> EventStream:
        if request.url.path == "/silent":
            await self.read_on.wait()
            await request.body()
        return EventStream(self._be_silent, explain=lambda error: b"", comment_s=60.0)

    async def _be_silent(self, output: EventOutput) -> None:
        await output.start()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.n_disconnects += 1
            raise

    async def _pieces(self, piece: bytes, n_pieces: int) -> AsyncIterator[bytes]:
        for _ in range(n_pieces):
            yield piece


@dataclass(frozen=True, slots=True)
class Client:
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        async with asyncio.timeout(HANG_S):
            return await self.reader.read()

    async def chunks(self) -> bytes:
        """The body of one answer that has no length."""
        body = bytearray()
        async with asyncio.timeout(HANG_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            while n_bytes := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(n_bytes)
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readexactly(2) == b"\r\n"
        return bytes(body)

    async def answer(self) -> tuple[int, bytes]:
        """One answer that has a length."""
        async with asyncio.timeout(HANG_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            return int(head.split()[1]), await self.reader.readexactly(int(length[1]))


@dataclass(frozen=True, slots=True)
class Site:
    """A server and what it counts."""

    app: App
    server: HttpServer
    refusals: Refusals
    budget: MemoryBudget
    port: int

    @property
    def connections(self) -> set[Any]:
        """The connections that the server has accepted."""
        return cast(set[Any], self.server.state.connections)

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def ask(self, data: bytes) -> bytes:
        """Sends what ends the connection, and returns all that comes back."""
        async with self.client() as client:
            await client.send(data)
            return await client.rest()


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Site]:
    listeners = listen("127.0.0.1:0")
    refusals, app = Refusals(), App()
    budget = MemoryBudget(2**20, refusals=refusals)
    server = HttpServer(
        app,
        listeners,
        limits=ConnectionLimits(**{**LIMITS, **limits}),
        refusals=refusals,
        budget=budget,
    )
    running = asyncio.ensure_future(server.run_until_stopped())
    port = listeners[0].getsockname()[1]
    try:
        yield Site(app, server, refusals, budget, port)
    finally:
        app.go_on.set()
        server.stop()
        async with asyncio.timeout(HANG_S):
            await running
        assert budget.n_bytes == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.001)


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


# Heads


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 5000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X" * 5000 + b": x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: x\r\n" * 10 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b" " * 9000, 431),
        (b"\r\n" * 5000, 431),
    ],
    ids=["url", "value", "name", "count", "blanks", "lines"],
)
async def test_too_large_head_is_refused(head: bytes, status: int) -> None:
    async with serving() as site:
        answer = await site.ask(head)
        assert status_of(answer) == status
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert site.refusals[Refusal.HEAD_TOO_LARGE] == 1
        assert site.app.n_requests == 0


async def test_head_of_many_small_packets_is_bounded_as_a_whole() -> None:
    async with serving() as site, site.client() as client:
        await client.send(b"GET / HTTP/1.1\r\n" + HOST + b"X: ")
        for _ in range(50):
            await client.send(b"x" * 100)
            await asyncio.sleep(0.001)
        assert status_of(await client.rest()) == 431


async def test_head_within_its_limits_is_taken_however_it_comes() -> None:
    head = b"GET / HTTP/1.1\r\n" + HOST + b"X: x\r\n" * 8 + b"Y: " + b"y" * 3500 + b"\r\n\r\n"
    async with serving() as site, site.client() as client:
        for size in (len(head), 100, 1):
            for start in range(0, len(head) if size > 1 else 0, size):
                await client.send(head[start : start + size])
                await asyncio.sleep(0)
            if size > 1:
                assert await client.answer() == (200, b"1.1 0 bytes")
        assert not site.refusals.total()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
        b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n",
        b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
    ids=["no host", "two hosts", "two hosts 1.0", "version", "connect", "two framings", "tls"],
)
async def test_malformed_head_is_refused(head: bytes) -> None:
    async with serving() as site:
        assert status_of(await site.ask(head)) == 400
        assert site.refusals[Refusal.MALFORMED] == 1
        assert site.app.n_requests == 0


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET / HT"], ids=["silent", "blank", "begun"])
async def test_head_that_does_not_come_in_time_is_refused(begun: bytes) -> None:
    async with serving(head_limit_s=0.05) as site:
        assert status_of(await site.ask(begun)) == 408
        assert site.refusals[Refusal.HEAD_TIMEOUT] == 1


async def test_head_that_drips_is_refused_as_soon() -> None:
    async with serving(head_limit_s=0.1) as site, site.client() as client:
        n_sent = 0
        for byte in GET:
            client.writer.write(bytes([byte]))
            n_sent += 1
            await asyncio.sleep(0.02)
            if client.reader.at_eof() or site.refusals[Refusal.HEAD_TIMEOUT]:
                break
        assert site.refusals[Refusal.HEAD_TIMEOUT] == 1
        assert n_sent < 20


async def test_next_head_has_its_own_time() -> None:
    async with serving(head_limit_s=0.5) as site, site.client() as client:
        await client.send(GET + GET[:5])
        assert (await client.answer())[0] == 200
        assert status_of(await client.rest()) == 408


async def test_idle_connection_is_closed_without_a_word() -> None:
    async with serving(idle_limit_s=0.05) as site, site.client() as client:
        await client.send(GET)
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""
        assert not site.refusals.total()


# Turns on the event loop


@asynccontextmanager
async def many_clients(site: Site, count: int) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(site.client()) for _ in range(count)]


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every pass of the event loop seem to take no time, so that each share does its smallest
    number of pieces of work in a pass, however slow the machine is."""
    share = partial(LoopShare, clock=lambda: 0.0)
    monkeypatch.setattr(loop_shares_module, "LoopShare", share)


@pytest.mark.usefixtures("short_passes")
async def test_requests_that_come_at_once_begin_a_few_in_each_pass_of_the_loop() -> None:
    async with serving() as site, many_clients(site, 200) as clients:
        for client in clients:
            client.writer.write(GET)
        largest, n_before = 0, 0
        while n_before < len(clients):
            await asyncio.sleep(0)
            n_begun = site.app.n_requests
            largest, n_before = max(largest, n_begun - n_before), n_begun
        assert largest == MIN_AT_ONCE
        for client in clients:
            assert (await client.answer())[0] == 200


@pytest.mark.usefixtures("short_passes")
async def test_probe_does_not_wait_for_the_requests_of_others() -> None:
    async with serving() as site, many_clients(site, 201) as clients:
        *posting, probing = clients
        for client in posting:
            client.writer.write(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n")
        await until(lambda: site.app.n_requests > 0)
        probing.writer.write(GET)
        assert (await probing.answer())[0] == 200
        assert site.app.n_requests < len(posting)


@pytest.mark.usefixtures("short_passes")
async def test_requests_whose_clients_have_gone_before_their_turn_do_not_begin() -> None:
    async with serving() as site, many_clients(site, 200) as clients:
        connections = site.connections
        for client in clients:
            client.writer.write(GET)
            client.writer.close()
        await until(lambda: not connections)
        assert site.app.n_requests < 20


async def test_clients_that_go_at_once_are_all_noticed() -> None:
    async with serving() as site:
        async with many_clients(site, 40) as clients:
            for client in clients:
                client.writer.write(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
            await until(lambda: site.app.n_requests == len(clients))
        await until(lambda: site.app.n_disconnects == 40)


async def test_body_that_is_parsed_over_many_turns_arrives_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "PARSE_S", 0.0)
    n_chunks = 30_000
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b"8\r\n12345678\r\n" * n_chunks + b"0\r\n\r\n"
    async with serving() as site, site.client() as client:
        await client.send(head + body + GET)
        assert await client.answer() == (200, b"1.1 %d bytes" % (8 * n_chunks))
        assert await client.answer() == (200, b"1.1 0 bytes")


async def test_client_that_sends_on_after_a_refusal_is_not_read_from_without_end() -> None:
    async with serving() as site, site.client() as client:
        client.writer.write(b"GET /" + b"x" * 5000)
        client.writer.write(b"x" * 2**25)
        await until(lambda: bool(site.connections))
        [connection] = site.connections
        async with asyncio.timeout(HANG_S):
            assert status_of(await client.reader.readline()) == 414
        await until(lambda: not site.connections)
        n_dropped: int = connection._n_dropped
        assert n_dropped <= MAX_DROPPED_BYTES + 2**18


@pytest.mark.parametrize("sent", [b"", GET, GET[:9], b"GET /" + b"x" * 5000], ids=len)
async def test_lost_connection_leaves_no_garbage(sent: bytes) -> None:
    gc.disable()
    try:
        async with serving() as site:
            async with site.client() as client:
                await client.send(sent)
                await until(lambda: bool(site.connections))
                [lost] = [weakref.ref(connection) for connection in site.connections]
                if sent == GET:
                    assert (await client.answer())[0] == 200
            await until(lambda: lost() is None)
    finally:
        gc.enable()


# What is sent ahead


async def test_requests_sent_ahead_are_answered_in_order_without_holding_the_loop() -> None:
    n_requests = 600
    async with serving() as site, site.client() as client:
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                began = time.thread_time()  # others may have the processor meanwhile
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - began)

        watching = asyncio.ensure_future(watch())
        bodies = [b"x" * (i % 7) for i in range(n_requests)]
        client.writer.write(
            b"".join(
                b"POST / HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (HOST, len(body), body)
                for body in bodies
            )
        )
        for body in bodies:
            assert await client.answer() == (200, b"1.1 %d bytes" % len(body))
        watching.cancel()
        assert longest < 0.25


async def test_client_that_sends_ahead_is_not_read_from_without_end() -> None:
    async with serving() as site, site.client() as client:
        client.writer.write(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n" + GET * 200_000)
        await until(lambda: site.app.n_requests == 1)
        [connection] = site.connections
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(connection._ahead) <= MAX_AHEAD_BYTES + 2**18 + 4096
        site.app.go_on.set()
        for _ in range(500):
            assert (await client.answer())[0] == 200


async def test_client_that_has_sent_ahead_and_gone_is_noticed() -> None:
    async with serving() as site:
        async with site.client() as client:
            await client.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
            await until(lambda: site.app.n_requests == 1)
            await client.send(GET)
        await until(lambda: site.app.n_disconnects == 1)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("n_bytes", [10, 300_000])
async def test_client_that_goes_ends_its_stream(version: bytes, n_bytes: int) -> None:
    head = b"POST /silent HTTP/%b\r\n%bContent-Length: %d\r\n\r\n" % (version, HOST, n_bytes)
    async with serving() as site:
        async with site.client() as client:
            client.writer.write(head + bytes(n_bytes))
            await until(lambda: site.app.n_requests == 1)
            site.app.read_on.set()
            await client.writer.drain()
            async with asyncio.timeout(HANG_S):
                await client.reader.readuntil(b"\r\n\r\n")
            assert site.app.n_disconnects == 0
        await until(lambda: site.app.n_disconnects == 1)


async def test_body_that_cannot_be_ends_the_stream_that_does_not_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.frontend.http.transport.connection.GOODBYE_S", 2 * HANG_S)
    head = b"GET /silent-unread HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    async with serving() as site, site.client() as client:
        await client.send(head + b"ZZZ\r\n")
        assert (await client.answer())[0] == 400
        await until(lambda: site.app.n_disconnects == 1)


async def test_client_that_goes_ends_its_first_request_though_the_next_came_with_it() -> None:
    async with serving() as site:
        async with site.client() as client:
            await client.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n" + GET)
            await until(lambda: site.app.n_requests == 1)
        await until(lambda: site.app.n_disconnects == 1)
        assert site.app.n_requests == 1


async def test_body_that_was_sent_ahead_is_not_read_from_without_end() -> None:
    head = b"POST /read-late HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n"
    async with serving() as site, site.client() as client:
        client.writer.write(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: site.app.n_requests == 1)
        client.writer.write(head % 2**24 + bytes(2**24))
        [connection] = site.connections
        await until(lambda: connection._is_ahead_paused)
        site.app.go_on.set()
        await until(lambda: site.app.n_requests == 2)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(connection._requests.last.body) <= MAX_AHEAD_BYTES + 2**18
        site.app.read_on.set()
        assert await client.answer() == (200, b"not read")
        assert await client.answer() == (200, b"1.1 %d bytes" % 2**24)


async def test_garbage_sent_ahead_does_not_spoil_the_answer_before_it() -> None:
    async with serving() as site, site.client() as client:
        await client.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n\x00garbage\r\n\r\n")
        await until(lambda: site.app.n_requests == 1)
        site.app.go_on.set()
        assert await client.answer() == (200, b"not read")
        assert b"200 OK" not in await client.rest()
        assert site.refusals[Refusal.MALFORMED] == 1


# Bodies


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n", method: bytes = b"POST /") -> bytes:
    head = method + b" HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


async def test_chunks_may_be_small_in_a_small_body() -> None:
    async with serving() as site, site.client() as client:
        await client.send(chunked(*[b"x"] * 1000))
        assert await client.answer() == (200, b"1.1 1000 bytes")


@pytest.mark.parametrize(
    "sent",
    [
        chunked(*[b"x"] * MAX_FRAMING_BYTES),
        chunked(end=b"5;" + b"x" * 2 * MAX_FRAMING_BYTES + b"\r\n"),
        chunked(bytes(10), end=b"0\r\nX: " + b"x" * 2 * MAX_FRAMING_BYTES),
        chunked(bytes(2**20), end=b"0\r\n" + b"X: x\r\n" * MAX_FRAMING_BYTES),
    ],
    ids=["tiny chunks", "extension", "trailer", "trailers"],
)
async def test_too_much_framing_is_refused(sent: bytes) -> None:
    async with serving() as site:
        assert status_of(await site.ask(sent)) == 413
        assert site.refusals[Refusal.BODY_TOO_LARGE] == 1


async def test_trailers_are_no_headers() -> None:
    async with serving() as site, site.client() as client:
        await client.send(chunked(b"body", end=b"0\r\n" + b"X: x\r\n" * 20 + b"\r\n"))
        assert await client.answer() == (200, b"1.1 4 bytes")
        await client.send(GET)
        assert await client.answer() == (200, b"1.1 0 bytes")


async def test_malformed_chunk_ends_the_request() -> None:
    async with serving() as site:
        assert status_of(await site.ask(chunked(b"body", end=b"nonsense\r\n"))) == 400
        assert site.refusals[Refusal.MALFORMED] == 1


async def test_body_that_was_not_wanted_is_read_for_a_limited_time() -> None:
    async with serving(body_limit_s=0.1) as site, site.client() as client:
        await client.send(b"POST /unread HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n")
        assert await client.answer() == (200, b"not read")
        await client.send(b"x")
        assert await client.rest() == b""
        assert site.refusals[Refusal.BODY_TIMEOUT] == 1


async def test_body_that_was_not_wanted_does_not_end_the_connection() -> None:
    async with serving() as site, site.client() as client:
        await client.send(b"POST /unread HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n")
        assert await client.answer() == (200, b"not read")
        await client.send(bytes(1000) + GET)
        assert await client.answer() == (200, b"1.1 0 bytes")


# Other protocols and versions


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize(
    ("framing", "body", "said"),
    [
        (b"Content-Length: 5\r\n", b"hello", b"1.1 5 bytes"),
        (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"1.1 5 bytes"),
        (b"", b"", b"1.1 0 bytes"),
    ],
    ids=["length", "chunked", "none"],
)
async def test_an_upgrade_is_ignored(
    framing: bytes, body: bytes, said: bytes, in_pieces: bool
) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    request = b"POST / HTTP/1.1\r\n" + HOST + framing + upgrade + b"\r\n" + body
    async with serving() as site, site.client() as client:
        for data in (request, request, GET):
            for start in range(0, len(data), 10 if in_pieces else len(data)):
                await client.send(data[start : start + (10 if in_pieces else len(data))])
                await asyncio.sleep(0)
        assert await client.answer() == (200, said)
        assert await client.answer() == (200, said)
        assert await client.answer() == (200, b"1.1 0 bytes")


async def test_an_upgrade_that_wants_the_connection_closed_has_it_closed() -> None:
    async with serving() as site:
        answer = await site.ask(
            b"GET / HTTP/1.1\r\n"
            + HOST
            + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert answer.endswith(b"1.1 0 bytes")


async def test_http_1_0_gets_no_chunks() -> None:
    async with serving() as site:
        head, _, body = (await site.ask(b"GET /stream HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"piece,piece,piece,"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        answer = await site.ask(b"GET / HTTP/1.0\r\n\r\n")
        assert b"content-length: 11" in answer
        assert answer.endswith(b"\r\n\r\n1.0 0 bytes")
        assert (await site.ask(b"HEAD /stream HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n")


# Places


async def test_the_longest_idle_connection_makes_room() -> None:
    async with (
        serving(max_connections=3) as site,
        site.client() as busy,
        site.client() as first,
        site.client() as second,
    ):
        await busy.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: site.app.n_requests == 1)
        for client in (first, second):
            await client.send(GET)
            assert (await client.answer())[0] == 200
        async with site.client() as third:
            await third.send(GET)
            assert (await third.answer())[0] == 200
            assert await first.rest() == b""
            await second.send(GET)
            assert (await second.answer())[0] == 200
            site.app.go_on.set()
            assert (await busy.answer())[0] == 200
        assert site.refusals[Refusal.CONNECTIONS] == 1


async def test_silent_connections_keep_nobody_out() -> None:
    async with serving(max_connections=2) as site:
        silent = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(10)]
        for i in range(2):
            silent[i][1].write(b"GET / HT")  # nor do those that have begun
        async with site.client() as client:
            await client.send(GET)
            assert (await client.answer())[0] == 200
        for _, writer in silent:
            writer.close()


async def test_busy_connections_are_not_closed_for_others() -> None:
    async with (
        serving(max_connections=1) as site,
        site.client() as busy,
    ):
        await busy.send(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: site.app.n_requests == 1)
        answer = await site.ask(GET)
        assert status_of(answer) == 503
        assert b"retry-after: 1" in answer
        site.app.go_on.set()
        assert (await busy.answer())[0] == 200


# Unread answers


async def test_answer_that_nobody_reads_ends_in_time() -> None:
    async with serving(send_limit_s=0.1) as site, site.client(limit=1) as client:
        await client.send(b"GET /big HTTP/1.1\r\n" + HOST + b"\r\n")
        await until(lambda: site.budget.n_bytes > 0)
        await until(lambda: site.refusals[Refusal.UNREAD] == 1)
        await until(lambda: not site.connections)
        assert site.budget.n_bytes == 0


async def test_reading_a_byte_now_and_then_does_not_help() -> None:
    async with serving(send_limit_s=0.1) as site, site.client(limit=1) as client:
        await client.send(b"GET /big HTTP/1.1\r\n" + HOST + b"\r\n")
        async with asyncio.timeout(HANG_S):
            while not site.refusals[Refusal.UNREAD]:
                await client.reader.read(1)
                await asyncio.sleep(0.01)


async def test_client_that_reads_slowly_but_reads_gets_everything() -> None:
    n_bytes = 0
    async with serving(send_limit_s=0.5) as site, site.client(limit=2**16) as client:
        await client.send(b"GET /big HTTP/1.0\r\n\r\n")
        await until(lambda: site.budget.n_bytes > 0)
        while data := await client.reader.read(2**21):
            n_bytes += len(data)
            if n_bytes < 2**22:
                await asyncio.sleep(0.002)
    assert n_bytes > 10_000 * 10_000
    assert not site.refusals.total()


async def test_events_that_go_past_the_app_keep_their_order_and_are_bounded() -> None:
    stream = b"GET /events HTTP/1.1\r\n" + HOST + b"\r\n"
    async with serving() as site, site.client(limit=2**12) as client:
        await client.send(stream + GET + stream)
        await until(lambda: bool(site.app.n_requests))
        [connection] = site.connections
        await until(lambda: connection._flow.write_paused)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert connection._transport.get_write_buffer_size() < 2**18
        assert await client.chunks() == EVENTS
        assert await client.answer() == (200, b"1.1 0 bytes")
        assert await client.chunks() == EVENTS


async def test_events_have_no_chunks_for_http_1_0() -> None:
    async with serving() as site:
        answer = await site.ask(b"GET /events HTTP/1.0\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == EVENTS


async def test_unread_answers_that_find_no_memory_end_at_once() -> None:
    async with serving() as site, site.client(limit=1) as client:
        with site.budget.share(2**20):
            await client.send(b"GET /big HTTP/1.1\r\n" + HOST + b"\r\n")
            await until(lambda: site.refusals[Refusal.UNREAD] == 1)


# Descriptors


def test_more_connections_than_descriptors_are_refused_at_the_start() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_descriptors((limit - RESERVED_DESCRIPTORS) // 2)
    with pytest.raises(ValueError, match=f"max_connections = {limit} needs .* may open {limit}"):
        check_descriptors(limit)


async def test_connections_wait_while_there_is_no_descriptor() -> None:
    """They are not closed, and nor is any other."""
    async with serving() as site, site.client() as before:
        await before.send(GET)
        assert (await before.answer())[0] == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket()
        n_open = max(map(int, os.listdir("/proc/self/fd"))) + 1
        fillers = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_open, hard))
            with suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            waiting.connect(("127.0.0.1", site.port))
            waiting.setblocking(False)
            await until(lambda: site.refusals[Refusal.CONNECTIONS] == 1)
            await before.send(GET)
            assert (await before.answer())[0] == 200
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        reader, writer = await asyncio.open_connection(sock=waiting)
        writer.write(GET)
        assert (await Client(reader, writer).answer())[0] == 200
        writer.close()
