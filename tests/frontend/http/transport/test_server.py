"""TLS on the loops there are, and answers that are gathered."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from services.common import address, tls
from services.frontend.http.transport.gathering_transport import (
    MAX_GATHERED_BYTES,
    GatheringTransport,
    WriteRound,
)
from services.frontend.http.transport.server import HttpServer
from services.frontend.loop_share import LoopShare
from tests.certificates import Authority, Pem, mount, serial_number_at
from tests.limits import HANG_S

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def without_complaints(
    caplog: pytest.LogCaptureFixture, new_loop: Callable[[], Any], main: Coroutine[Any, Any, None]
) -> None:
    """Runs a coroutine on one of the loops there are."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@dataclass(frozen=True, slots=True)
class Site:
    """A server over TLS, and what a client needs of it."""

    url: str
    trust: ssl.SSLContext
    renew: Callable[[], Pem]


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Site]:
    authority = Authority()

    def renew() -> Pem:
        pem = authority.issue("127.0.0.1")
        mount(directory, {"tls.crt": pem.certificate, "tls.key": pem.key})
        return pem

    renew()
    trust = ssl.create_default_context(cadata=authority.certificate.decode())
    listeners = address.listen("127.0.0.1:0")
    server = HttpServer(_say_scheme, listeners, tls=tls.server_context(directory))
    running = asyncio.ensure_future(server.run_until_stopped())
    try:
        yield Site(f"https://127.0.0.1:{listeners[0].getsockname()[1]}", trust, renew)
    finally:
        server.stop()
        async with asyncio.timeout(HANG_S):
            await running


async def test_a_client_has_its_own_address_at_a_socket_of_both_families() -> None:
    async def say_client(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    listeners = address.listen("[::]:0")
    server = HttpServer(say_client, listeners)
    running = asyncio.ensure_future(server.run_until_stopped())
    async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
        for host, url in (("127.0.0.1", "http://127.0.0.1"), ("::1", "http://[::1]")):
            assert (await client.get(f"{url}:{listeners[0].getsockname()[1]}")).text == host
    server.stop()
    async with asyncio.timeout(HANG_S):
        await running


async def _say_scheme(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(scope["scheme"])(scope, receive, send)


@LOOPS
def test_renewed_certificates_are_shown_and_plaintext_is_refused(
    tmp_path: Path, new_loop: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as site:
            async with httpx.AsyncClient(verify=site.trust, timeout=HANG_S) as client:
                assert (await client.get(site.url)).text == "https"
                with pytest.raises(httpx.TransportError):
                    await client.get(site.url.replace("https", "http"))
            for _ in range(2):
                pem = site.renew()
                address = site.url.removeprefix("https://")
                shown = await asyncio.to_thread(
                    serial_number_at, address, site.trust, name="127.0.0.1"
                )
                assert shown == pem.serial_number

    without_complaints(caplog, new_loop, main())


@LOOPS
def test_clients_with_idle_connections_do_not_hold_up_the_end(
    tmp_path: Path, new_loop: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        # This client does nothing by itself: it does not look at connections between its calls.
        with httpx.Client(timeout=HANG_S, verify=False) as client:
            async with serving(tmp_path) as site:
                await asyncio.to_thread(client.get, site.url)

    without_complaints(caplog, new_loop, main())


class Wire(asyncio.Transport):
    """Keeps what is written to it, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed


class BrokenWire(Wire):
    """Fails whenever something is written to it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise ZeroDivisionError


def gathering(wire: Wire) -> GatheringTransport:
    loop = asyncio.get_running_loop()
    return GatheringTransport(wire, WriteRound(loop), LoopShare(loop))


async def test_a_connection_that_fails_keeps_no_other_from_writing() -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    round_, share = WriteRound(loop), LoopShare(loop)
    wires = [Wire(), BrokenWire(), Wire(), Wire()]
    for wire in wires:
        GatheringTransport(wire, round_, share).write(b"token")
    for _ in range(3):
        await asyncio.sleep(0)
    assert [wire.writes for wire in wires] == [[b"token"], [], [b"token"], [b"token"]]
    assert [type(failure) for failure in failures] == [ZeroDivisionError]


async def test_what_is_written_in_one_round_goes_out_as_one_write() -> None:
    wire = Wire()
    transport = gathering(wire)
    transport.write(b"token, ")
    transport.write(b"end")
    assert wire.writes == []
    await asyncio.sleep(0)
    transport.write(b"more")
    await asyncio.sleep(0)
    assert wire.writes == [b"token, end", b"more"]


async def test_a_client_that_does_not_keep_up_is_noticed_before_the_round_ends() -> None:
    wire = Wire()
    transport = gathering(wire)
    transport.write(b"x" * MAX_GATHERED_BYTES)
    transport.write(b"y")
    assert wire.writes == [b"x" * MAX_GATHERED_BYTES + b"y"]


async def test_closing_writes_what_was_gathered_and_aborting_does_not() -> None:
    closed, aborted = Wire(), Wire()
    for wire in (closed, aborted):
        transport = gathering(wire)
        transport.write(b"last words")
        if wire is closed:
            transport.close()
        else:
            transport.abort()
    await asyncio.sleep(0)
    assert closed.writes == [b"last words"]
    assert aborted.writes == []


async def test_nothing_is_written_to_a_client_that_has_gone_meanwhile() -> None:
    wire = Wire()
    transport = gathering(wire)
    transport.write(b"too late")
    wire.close()
    await asyncio.sleep(0)
    assert wire.writes == []
