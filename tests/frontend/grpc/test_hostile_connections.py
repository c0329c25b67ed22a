"""Connections that break the rules of HTTP/2, or the manners; an honest client beside them."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common import rpc
from services.frontend.request.refusals import Refusal
from tests.fake_scheduler import FakeRequest, FakeScheduler
from tests.frontend.conftest import Site, running, soon
from tests.http2_client import Http2Client, framed
from tests.limits import HANG_S

DESCRIBE = "/orcinus.v1.InferenceService/DescribeModel"
GENERATE = "/orcinus.v1.InferenceService/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


@contextlib.asynccontextmanager
async def attacked(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Site, Http2Client]]:
    """A frontend and a connection to it; in the end an honest client must still be answered."""
    async with running(tmp_path, **settings) as site:
        async with Http2Client.connected(site.frontend.grpc_address) as client:
            await client.wait_over(client.call(DESCRIBE))
            yield site, client
            await check_honest(site)
        await check_honest(site)


async def check_honest(site: Site) -> None:
    prompt = inference_pb2.Prompt(text="x")
    answer = await soon(site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt)))
    assert answer.choices[0].text


async def test_pings_are_answered_and_end_no_connection(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, client):
        client.send_raw(frame(PING, b"12345678") * 1000)
        assert (await client.wait_over(client.call(DESCRIBE))).status == 0
        assert client.error_code is None


@pytest.mark.thorough
async def test_a_flood_of_pings_ends_its_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        host, _, port = site.frontend.grpc_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))

        async def take_answers() -> None:
            while await reader.read(2**16):
                pass

        async def flood() -> None:
            while True:
                writer.write(frame(PING, b"12345678") * 1000)
                await writer.drain()

        taking = asyncio.ensure_future(take_answers())
        writer.write(PREFACE + frame(SETTINGS))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(), HANG_S)
        await asyncio.gather(taking, return_exceptions=True)
        writer.close()
        assert site.frontend._refusals[Refusal.HEAD_TOO_LARGE] == 1
        await check_honest(site)


@pytest.mark.thorough
async def test_a_flood_of_resets_leaves_nothing(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (site, client):
        for _ in range(2000):
            client.reset(client.call(GENERATE, b"\x12\x03\x0a\x01x"))
        await client._writer.drain()
        await check_honest(site)
        async with asyncio.timeout(HANG_S):
            while site.frontend._admission.n_in_flight:
                await asyncio.sleep(0.01)


async def test_a_flood_of_continuations_ends_its_connection(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (site, client):
        stream = client.begin_unsent(GENERATE)
        header = b"\x00\x01a\x7f\xe1\x1e" + b"b" * 4064  # a literal of 4,064 bytes, not indexed
        # As one piece, since no other frame may come between. 8 MB of metadata for one call.
        rest = frame(CONTINUATION, header, stream=stream) * 2000
        client.send_raw(frame(HEADERS, header, stream=stream) + rest)
        await client.wait_closed()
        assert site.frontend._refusals[Refusal.HEAD_TOO_LARGE] == 1


async def test_metadata_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, client):
        for n_bytes, status in ((rpc.MAX_METADATA_BYTES - 2000, 0), (30_000, EXHAUSTED)):
            stream = client.call(DESCRIBE, metadata=[("x", "y" * n_bytes)])
            assert (await client.wait_over(stream)).status == status


async def test_a_flood_of_settings_is_survived(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, client):
        client.send_raw(frame(SETTINGS, struct.pack(">HI", 4, 1000)) * 10_000)
        await client._writer.drain()


async def test_clients_are_told_how_many_streams_they_may_have(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, client):
        assert client.h2.remote_settings.max_concurrent_streams == rpc.MAX_STREAMS


async def test_calls_beyond_the_streams_of_a_connection_wait(tmp_path: Path) -> None:
    async def answer(request: FakeRequest) -> None:
        request.accept()
        await asyncio.sleep(0.2)
        request.last_token(5, scheduler_pb2.COMPLETION_REASON_LENGTH)

    async with running(tmp_path, FakeScheduler(answer)) as site:
        prompt = inference_pb2.Prompt(text="x")
        request = inference_pb2.GenerateRequest(prompt=prompt)
        calls = [site.inference.generate(request) for _ in range(rpc.MAX_STREAMS + 50)]
        answers = await soon(asyncio.gather(*calls))
        assert len(answers) == len(calls)


async def test_connections_beyond_the_limit_are_closed(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections=3) as site:
        await check_honest(site)  # has one of them
        async with (
            Http2Client.connected(site.frontend.grpc_address) as first,
            Http2Client.connected(site.frontend.grpc_address) as second,
        ):
            for client in (first, second):
                assert (await client.wait_over(client.call(DESCRIBE))).status == 0
            async with Http2Client.connected(site.frontend.grpc_address) as third:
                await third.wait_closed()
            await check_honest(site)


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    async with running(tmp_path, head_limit_s=0.2, idle_limit_s=0.3) as site:
        host, _, port = site.frontend.grpc_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(HANG_S):
            while await reader.read(1000):  # the server's settings come first
                pass
        writer.close()
        async with Http2Client.connected(site.frontend.grpc_address) as idle:
            await idle.wait_over(idle.call(DESCRIBE))
            await idle.wait_closed()
        await check_honest(site)


async def test_streams_that_nobody_reads_take_no_more_than_a_window(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (site, client):
        # A watch reads one message and no more.
        stream = client.begin(WATCH)
        client.send(stream, framed(b""))
        await client.wait_messages(stream, 1)
        n_bytes = 0
        async with asyncio.timeout(HANG_S):
            for _ in range(50):
                while (window := client.h2.local_flow_control_window(stream)) > 0:
                    client.send(stream, b"x" * min(window, 16384))
                    n_bytes += min(window, 16384)
                await asyncio.sleep(0.01)  # for the server to grant more
        assert n_bytes <= 2 * rpc.WINDOW_BYTES
        assert not client.answers[stream].is_over
        await check_honest(site)


@pytest.mark.thorough
async def test_ten_thousand_streams_with_half_a_message(tmp_path: Path) -> None:
    async with running(tmp_path, body_limit_s=5.0) as site:
        async with (
            Http2Client.connected(site.frontend.grpc_address) as first,
            Http2Client.connected(site.frontend.grpc_address) as second,
        ):
            for client in (first, second):
                await client.wait_over(client.call(DESCRIBE))
            for _ in range(5_000):
                for client in (first, second):
                    if client.h2.open_outbound_streams < rpc.MAX_STREAMS:
                        await client.wait_window(500)
                        client.send(client.begin(GENERATE), framed(b"x" * 1000)[:500])
                await asyncio.sleep(0)
            await check_honest(site)
        await check_honest(site)
