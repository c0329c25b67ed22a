"""WatchService over a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from orcinus.v1 import watch_pb2, watch_pb2_grpc

from services.common import rpc, rpc_handlers
from services.scheduler.watching.watch_service import SERVICE, WatchService
from tests.scheduler.watching.play import Play, kinds

LIMIT_S = 30


@contextlib.asynccontextmanager
async def serving(service: WatchService) -> AsyncIterator[watch_pb2_grpc.WatchServiceStub]:
    """A stub of a service on a socket."""
    server = rpc.create_server()
    server.add_generic_rpc_handlers((rpc_handlers.service_handler(SERVICE, service),))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.connect(address) as channel:
        yield watch_pb2_grpc.WatchServiceStub(channel)
    await server.stop(grace=0)


async def read(call: "grpc.aio.UnaryStreamCall[object, object]") -> list[watch_pb2.WatchEvent]:
    """The events of the next message."""
    message = await asyncio.wait_for(call.read(), LIMIT_S)
    assert isinstance(message, watch_pb2.WatchResponse)
    return list(message.events)


async def read_on(call: "grpc.aio.UnaryStreamCall[object, object]") -> None:
    """Reads until the watch ends."""
    while True:
        await read(call)


async def test_a_watch_goes_on_across_epochs_and_ends_with_the_leadership() -> None:
    play = Play()
    service = WatchService(play.watching)
    service.is_leading = True
    async with serving(service) as stub:
        call = stub.Watch(watch_pb2.WatchRequest())
        await call.initial_metadata()
        play.open()
        play.submit("a", max_new_tokens=9)
        play.run()
        assert set(kinds(await read(call))) == {"epoch", "request", "iteration", "pool"}
        play.lose()
        play.open()
        assert kinds(await read(call)).count("epoch") == 1
        play.watching.end("this scheduler no longer leads")
        with pytest.raises(grpc.aio.AioRpcError, match="no longer leads") as caught:
            await read_on(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nobody_watches_a_scheduler_that_does_not_lead() -> None:
    async with serving(WatchService(Play().watching)) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="not the leader") as caught:
            await stub.Watch(watch_pb2.WatchRequest()).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_there_are_only_so_many_watchers() -> None:
    play = Play()
    service = WatchService(play.watching, max_watchers=1)
    service.is_leading = True
    async with serving(service) as stub:
        call = stub.Watch(watch_pb2.WatchRequest())
        await call.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError, match="1 watchers") as caught:
            await stub.Watch(watch_pb2.WatchRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()


async def test_a_watcher_that_leaves_costs_nothing_more() -> None:
    play = Play()
    service = WatchService(play.watching)
    service.is_leading = True
    async with serving(service) as stub:
        call = stub.Watch(watch_pb2.WatchRequest())
        await call.initial_metadata()
        assert play.watching.is_watched
        call.cancel()
        async with asyncio.timeout(LIMIT_S):
            while play.watching.is_watched:
                await asyncio.sleep(0.01)
