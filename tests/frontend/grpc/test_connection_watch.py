"""The end of connections that send what is no part of a call, and of no others."""

import asyncio
import contextlib
import math
import select
import socket
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest
from orcinus.v1 import inference_pb2

from services.common import rpc
from services.common.address import Address, listen
from services.common.rpc import MAX_STREAMS, WINDOW_BYTES
from services.frontend.grpc import server_sockets
from services.frontend.grpc.connection_watch import (
    HELD_S,
    MAX_DEBT_BYTES,
    MAX_DEBTS_BYTES,
    MAX_RECEIVE_BYTES,
    PERIOD_S,
    QUIET_DEBT_BYTES,
    QUIET_S,
    RECEIVE_BYTES,
    ConnectionWatch,
    receive_bytes,
)
from services.frontend.request.refusals import Refusal, Refusals
from tests.frontend.conftest import InferenceClient, running, soon

MAX_MESSAGE_BYTES = 2**20


def peer_of(client: socket.socket) -> str:
    """gRPC's word for a client's address."""
    host, port = client.getsockname()[:2]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


@pytest.fixture(
    params=[("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")],
    ids=["IPv4", "IPv6", "IPv4 at a socket of both"],
)
def sockets(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's socket and the server's."""
    host, client_host = request.param
    (listening,) = listen(str(Address(host, 0)))
    with (
        listening as listener,
        socket.create_connection((client_host, listener.getsockname()[1])) as client,
        listener.accept()[0] as server,
    ):
        server.setblocking(False)
        yield client, server


def send(client: socket.socket, server: socket.socket, n_bytes: int) -> None:
    """Sends that many bytes, which are received."""
    while n_bytes:
        n_sent = client.send(bytes(min(n_bytes, 2**14)))
        n_bytes -= n_sent
        while n_sent:
            with contextlib.suppress(BlockingIOError):
                n_sent -= len(server.recv(n_sent))


def is_open(server: socket.socket) -> bool:
    try:
        return server.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


Sockets = tuple[socket.socket, socket.socket]


PERIODS = [PERIOD_S, QUIET_S]
"""A connection is new at the first look; at the second one, it has been quiet for long enough."""


def look(watch: ConnectionWatch, server: socket.socket, for_s: Sequence[float] = PERIODS) -> None:
    """Looks so many seconds after the look before, each time."""
    for period_s in for_s:
        watch.look(server.getsockname()[1], period_s)


def comes(client: socket.socket, server: socket.socket, within_s: float) -> bool:
    """Sends a byte, and returns whether the server's socket receives it in that time."""
    client.send(b"x")
    return bool(select.select([server], [], [], within_s)[0]) and server.recv(2) == b"x"


def comes_at_last(server: socket.socket) -> bool:
    """Returns whether what `comes` has sent arrives after all."""
    return bool(select.select([server], [], [], 5.0)[0]) and server.recv(2) == b"x"


def test_a_connection_without_calls_is_held_back_until_one_begins(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    send(client, server, QUIET_DEBT_BYTES)
    look(watch, server)
    assert comes(client, server, 5.0), "it may send as much"
    send(client, server, 2**13)
    look(watch, server)
    assert not comes(client, server, 0.3)
    watch.note_call(peer_of(client), [])
    look(watch, server, [0.0])
    assert comes_at_last(server)


def test_a_connection_with_calls_may_send_what_many_of_them_need(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(refusals := Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    for _ in range(2):
        send(client, server, MAX_DEBT_BYTES // 2)
        watch.note_call(peer_of(client), [])
        look(watch, server, [PERIOD_S])
        assert comes(client, server, 5.0)
    send(client, server, 4 * WINDOW_BYTES)
    watch.note_call(peer_of(client), [])
    look(watch, server, [PERIOD_S])
    assert not is_open(server)
    assert refusals[Refusal.HEAD_TOO_LARGE] == 1


def test_time_in_which_calls_could_not_begin_counts_against_nobody(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(refusals := Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    send(client, server, 2**20)
    look(watch, server, [PERIOD_S])
    watch.look(server.getsockname()[1], PERIOD_S + 1.0, late_s=1.0)
    assert comes(client, server, 5.0)
    look(watch, server, [QUIET_S])
    assert not comes(client, server, 0.3)
    watch.look(server.getsockname()[1], PERIOD_S + 10.0, late_s=10.0)
    look(watch, server, [0.0])
    assert is_open(server)
    assert refusals.total() == 0


def test_a_client_that_comes_again_from_an_address_owes_nothing() -> None:
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    address = None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for n_bytes in (2**12, 2**10):
            with socket.create_connection(listener.getsockname(), 5, address) as client:
                address = client.getsockname()
                # Closed, it leaves nothing behind that keeps the address.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with listener.accept()[0] as server:
                    send(client, server, n_bytes)
                    for _ in range(5 * QUIET_DEBT_BYTES // 2**12):  # answers, which it takes
                        server.sendall(bytes(n_bytes))
                        client.recv(n_bytes, socket.MSG_WAITALL)
                    server.setblocking(False)
                    look(watch, server)
                    assert comes(client, server, 5.0)


def test_a_connection_that_is_held_back_for_long_ends(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(refusals := Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    send(client, server, 2**20)
    look(watch, server)
    for _ in range(2):
        assert is_open(server)
        look(watch, server, [0.6 * HELD_S])
    assert not is_open(server)
    assert refusals[Refusal.HEAD_TOO_LARGE] == 1


def test_a_connection_that_pays_in_time_is_held_back_no_longer(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    send(client, server, QUIET_DEBT_BYTES + 2**13)
    look(watch, server)
    assert not comes(client, server, 0.1)
    look(watch, server, [0.6 * HELD_S] * 3)
    assert comes_at_last(server)
    assert is_open(server)


def test_all_connections_together_may_send_so_much() -> None:
    watch = ConnectionWatch(refusals := Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    n_large = MAX_DEBTS_BYTES // MAX_DEBT_BYTES + 1
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        servers = []
        for n_bytes in [MAX_DEBT_BYTES // 2, *[MAX_DEBT_BYTES] * n_large]:
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            servers.append(stack.enter_context(listener.accept()[0]))
            servers[-1].setblocking(False)
            send(client, servers[-1], n_bytes)
        watch.look(listener.getsockname()[1], 0.0)
        assert is_open(servers[0]), "those that sent most end"
        assert sum(map(is_open, servers[1:])) == n_large - 1
        assert refusals[Refusal.HEAD_TOO_LARGE] == 1


@pytest.mark.parametrize(
    ("rtt_ms", "n_bytes"),
    [(0.1, RECEIVE_BYTES), (20, 41943), (200, MAX_RECEIVE_BYTES), (4e6, RECEIVE_BYTES)],
    ids=["in a cluster", "in a country", "over an ocean", "unknown"],
)
def test_the_kernel_keeps_more_where_the_way_is_long(rtt_ms: float, n_bytes: int) -> None:
    assert receive_bytes(int(1e3 * rtt_ms)) == n_bytes


def test_a_window_grows_while_its_connection_lives() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        server_sockets.set_receive_bytes(listener, RECEIVE_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server = stack.enter_context(listener.accept()[0])
        server.setblocking(False)
        client.setblocking(False)
        send(client, server, RECEIVE_BYTES)
        server_sockets.set_receive_bytes(server, MAX_RECEIVE_BYTES)
        n_read = 0
        for _ in range(64):  # the window opens as its bytes are read
            with contextlib.suppress(BlockingIOError):
                client.send(bytes(2**17))
            select.select([server], [], [], 1.0)
            n_read = max(n_read, len(server.recv(2**20)))
        assert n_read > 4 * RECEIVE_BYTES


async def test_a_message_is_no_such_thing_while_it_comes_nor_when_it_has(sockets: Sockets) -> None:
    client, server = sockets
    port, came = server.getsockname()[1], asyncio.get_running_loop().create_future()
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    context = SimpleNamespace(peer=lambda: peer_of(client), read=lambda: came)
    for _ in range(3):
        came = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(watch.read(context))
        await asyncio.sleep(0)
        send(client, server, MAX_MESSAGE_BYTES)
        watch.look(port, 0.0)
        assert is_open(server)
        came.set_result(bytes(MAX_MESSAGE_BYTES))
        await reading
        watch.look(port, 0.0)
        assert is_open(server)
    send(client, server, QUIET_DEBT_BYTES + 2**14)  # nothing is left of what they were allowed
    watch.look(port, QUIET_S)
    assert not comes(client, server, 0.3)


def test_metadata_counts_as_part_of_its_call(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    for _ in range(100):
        send(client, server, 2**14)
        watch.note_call(peer_of(client), [("x", "y" * 2**14)])
    watch.look(server.getsockname()[1], 0.0)
    assert is_open(server)


def test_sockets_that_are_closed_while_others_are_looked_at_are_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        address = listener.getsockname()
        accepted = []
        for _ in range(4):
            stack.enter_context(socket.create_connection(address))
            accepted.append(stack.enter_context(listener.accept()[0]))
        n_found = 0
        for found in server_sockets.sockets_at(address[1]):
            n_found += 1
            for connection in accepted:
                if connection.fileno() != found.fileno():
                    connection.close()
        assert n_found <= 2, "the listener, and one that was looked at"


async def test_the_kernel_keeps_little_for_a_connection() -> None:
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watching = asyncio.create_task(watch.run(listener.getsockname()[1]))
        await asyncio.sleep(0)
        with (
            socket.create_connection(listener.getsockname()),
            listener.accept()[0] as connection,
        ):
            kept = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert kept == 2 * RECEIVE_BYTES  # with what the kernel itself needs for them
        watching.cancel()


def test_connections_of_other_ports_are_left_alone(sockets: Sockets) -> None:
    client, server = sockets
    watch = ConnectionWatch(Refusals(), max_message_bytes=MAX_MESSAGE_BYTES)
    send(client, server, 2 * MAX_DEBT_BYTES)
    watch.look(client.getsockname()[1] - 1, 0.1)
    assert is_open(server)


async def test_large_calls_of_an_honest_client_are_answered(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=2**20) as site:
        prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[7] * 2**18))
        for _ in range(12):  # 3 MiB, each refused when it has been received
            with pytest.raises(grpc.aio.AioRpcError, match="has 262144 tokens"):
                await soon(site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt)))
        refusals = site.frontend._refusals
        assert refusals[Refusal.PROMPT_TOO_LONG] == 12
        assert not refusals[Refusal.HEAD_TOO_LARGE]


@contextlib.asynccontextmanager
async def slow_way_to(address: str, *, bytes_per_s: float) -> AsyncIterator[str]:
    """A way to a server on which messages come slowly."""
    host, _, port = address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(host, int(port))
        ways = (pass_on(reader, forth, bytes_per_s), pass_on(back, writer, math.inf))
        await asyncio.gather(*ways, return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float
) -> None:
    while data := await reader.read(2**14):
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(len(data) / bytes_per_s)
    writer.close()


@pytest.mark.thorough
async def test_the_largest_message_arrives_over_a_slow_link(tmp_path: Path) -> None:
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[300] * (2**21 - 64)))
    request = inference_pb2.GenerateRequest(prompt=prompt)
    async with (
        running(tmp_path, max_body_bytes=2**22) as site,
        slow_way_to(site.frontend.grpc_address, bytes_per_s=2**21) as address,
        rpc.connect(address) as channel,
    ):
        assert 2**22 - 256 < request.ByteSize() <= 2**22
        with pytest.raises(grpc.aio.AioRpcError, match="has 2097088 tokens"):
            await soon(InferenceClient(channel).generate(request))
        assert not site.frontend._refusals[Refusal.HEAD_TOO_LARGE]


async def test_many_calls_at_once_on_a_new_connection_are_answered(tmp_path: Path) -> None:
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[300] * 2**13))
    async with running(tmp_path) as site, rpc.connect(site.frontend.grpc_address) as channel:
        client = InferenceClient(channel)
        calls = [
            client.generate(inference_pb2.GenerateRequest(prompt=prompt))
            for _ in range(MAX_STREAMS)
        ]
        for end in await soon(asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(end, grpc.aio.AioRpcError)
            assert "has 8192 tokens" in (end.details() or "")
        assert not site.frontend._refusals[Refusal.HEAD_TOO_LARGE]


async def test_bursts_and_refused_calls_end_no_stream(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": []}')
    large = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="a" * 60_000))
    async with running(tmp_path, api_keys_file=keys) as site:
        for _ in range(5):
            calls = [site.inference.generate(large) for _ in range(40)]
            ends = await soon(asyncio.gather(*calls, return_exceptions=True))
            codes = {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)}
            assert codes == {grpc.StatusCode.UNAUTHENTICATED}
        assert site.frontend._refusals[Refusal.HEAD_TOO_LARGE] == 0
