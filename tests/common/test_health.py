"""The health service over real connections, with watchers that read and watchers that do not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import rpc, rpc_handlers
from services.common.exchange import TimedExchange
from services.common.health import READINESS, Health
from services.common.health_servicer import MAX_NAME_LENGTH, SERVICE, HealthServicer, HealthStatuses
from tests.http2_client import Http2Client
from tests.limits import HANG_S

API = "orcinus.v1.TestService"
WATCH = "/grpc.health.v1.Health/Watch"
STATUSES = health_pb2.HealthCheckResponse


def asking(name: str = API) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


@contextlib.asynccontextmanager
async def healthy(
    *, send_limit_s: float = 1000.0, exchange: type[TimedExchange] = TimedExchange
) -> AsyncIterator[tuple[Health, str]]:
    """Something that tells its health, and where."""
    health = Health(API)
    await health.start()
    server = rpc.create_server()
    timed = partial(exchange, receive_limit_s=30.0, send_limit_s=send_limit_s)
    health.add_to(server, exchange=timed)
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield health, address
    finally:
        await server.stop(grace=0)


@contextlib.asynccontextmanager
async def calling(address: str) -> AsyncIterator[Any]:
    async with rpc.connect(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def read(watch: Any) -> int:
    async with asyncio.timeout(HANG_S):
        return int((await watch.read()).status)


async def failure(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(HANG_S):
            await call
    return caught.value.code()


async def test_check_answers_by_name_and_knows_no_others() -> None:
    async with healthy() as (health, address), calling(address) as stub:
        await health.set_ready(True)
        assert (await stub.Check(asking(READINESS))).status == STATUSES.SERVING
        assert (await stub.Check(asking())).status == STATUSES.NOT_SERVING
        assert await failure(stub.Check(asking("nonsense"))) is grpc.StatusCode.NOT_FOUND
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert listed[READINESS].status == STATUSES.SERVING
        assert {"startup", "liveness", "", API} <= set(listed)


async def test_watch_follows_a_name_from_before_it_is_known() -> None:
    async with healthy() as (health, address), calling(address) as stub:
        watch, late = stub.Watch(asking()), stub.Watch(asking("serving"))
        assert await read(watch) == STATUSES.NOT_SERVING
        assert await read(late) == STATUSES.SERVICE_UNKNOWN
        await health.set_serving(True)
        assert await read(watch) == STATUSES.SERVING
        await health.set_giving_tokens(False)
        assert await read(late) == STATUSES.NOT_SERVING
        await health.set_serving(False)
        assert await read(watch) == STATUSES.NOT_SERVING


async def test_a_watcher_who_does_not_read_holds_up_nobody_and_then_gets_the_latest() -> None:
    async with (
        healthy() as (health, address),
        calling(address) as stub,
        Http2Client.connected(address, window=0) as deaf,
    ):
        unread = deaf.call(WATCH, asking().SerializeToString())
        watch = stub.Watch(asking())
        assert await read(watch) == STATUSES.NOT_SERVING
        for is_serving in (True, False, True, False, True):
            async with asyncio.timeout(HANG_S):
                await health.set_serving(is_serving)
            assert await read(watch) == (STATUSES.SERVING if is_serving else STATUSES.NOT_SERVING)
        deaf.open_window(unread, 1000)
        first, last = await deaf.wait_messages(unread, 2)
        assert STATUSES.FromString(first).status == STATUSES.NOT_SERVING  # it was on its way
        assert STATUSES.FromString(last).status == STATUSES.SERVING


async def test_a_watch_that_is_not_read_ends() -> None:
    has_ended = asyncio.Event()

    class NotedExchange(TimedExchange):
        def note_unread(self, _: Any) -> None:
            has_ended.set()

    async with (
        healthy(send_limit_s=0.05, exchange=NotedExchange) as (_, address),
        Http2Client.connected(address, window=0) as deaf,
    ):
        unread = deaf.call(WATCH, asking().SerializeToString())
        async with asyncio.timeout(HANG_S):
            await has_ended.wait()
        deaf.open_window(unread, 1000)
        answer = await deaf.wait_over(unread)
        assert answer.status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert len(answer.messages) == 1


async def test_a_quiet_watch_that_is_read_does_not_end() -> None:
    async with healthy(send_limit_s=0.3) as (health, address), calling(address) as stub:
        watch = stub.Watch(asking())
        assert await read(watch) == STATUSES.NOT_SERVING
        await asyncio.sleep(0.6)
        await health.set_serving(True)
        assert await read(watch) == STATUSES.SERVING


async def test_watches_are_bounded_and_checks_are_not() -> None:
    statuses = HealthStatuses()
    statuses.set(API, STATUSES.SERVING)
    servicer = HealthServicer(statuses, max_watches=2)
    server = rpc.create_server()
    server.add_generic_rpc_handlers((rpc_handlers.service_handler(SERVICE, servicer),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with calling(address) as stub:
        watches = [stub.Watch(asking()) for _ in range(2)]
        for watch in watches:
            assert await read(watch) == STATUSES.SERVING
        refused = await failure(stub.Watch(asking()).read())
        assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(asking())).status == STATUSES.SERVING
        watches[0].cancel()
        async with asyncio.timeout(HANG_S):
            while servicer.n_watches == 2:
                await asyncio.sleep(0.01)
        assert await read(stub.Watch(asking())) == STATUSES.SERVING
    await server.stop(grace=0)


async def test_a_name_longer_than_any_is_refused() -> None:
    async with healthy() as (_, address), calling(address) as stub:
        watch = stub.Watch(asking("x" * (MAX_NAME_LENGTH + 1)))
        assert await failure(watch.read()) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_server_with_watches_stops_at_once() -> None:
    async with (
        asyncio.timeout(HANG_S),
        healthy() as (_, address),
        Http2Client.connected(address, window=0) as deaf,
    ):
        stream = deaf.call(WATCH, asking().SerializeToString())
        while "content-type" not in deaf.answers[stream].metadata:
            await asyncio.sleep(0.01)


async def test_the_end_of_a_server_that_waits_for_its_calls_does_not_wait_for_watches() -> None:
    health = Health(API)
    await health.start()
    await health.set_ready(True)
    server = rpc.create_server()
    health.add_to(server)
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with calling(address) as stub, asyncio.timeout(HANG_S):
        watch = stub.Watch(asking(READINESS))
        assert await read(watch) == STATUSES.SERVING
        await health.set_ready(False)
        health.end()
        await server.stop(grace=10 * HANG_S)
        assert await read(watch) == STATUSES.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
