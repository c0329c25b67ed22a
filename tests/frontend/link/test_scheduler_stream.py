"""How far a scheduler may run ahead of a frontend that has no time to read."""

import asyncio
from typing import Any

import grpc.aio
from orcinus.v1 import scheduler_pb2

from services.common import rpc
from services.frontend.link.scheduler_stream import AHEAD_BYTES, SERVICE, STREAM_OPTIONS
from tests.frontend.conftest import soon
from tests.limits import HANG_S

N_MESSAGES = 500
MESSAGE = scheduler_pb2.ConnectResponse(
    columns=scheduler_pb2.TokenColumns(
        numbers=range(300, 332), starts=[200] * 32, n_tokens=[1] * 32, token_ids=range(1000, 1032)
    )
)
"""What an iteration of 32 requests brings."""


class Flood:
    """A scheduler that sends as fast as it can."""

    def __init__(self) -> None:
        self.n_sent = 0

    async def connect(self, _requests: object, context: Any) -> None:
        for _ in range(N_MESSAGES):
            await context.write(MESSAGE.SerializeToString())
            self.n_sent += 1


async def test_a_scheduler_runs_ahead_by_few_iterations() -> None:
    flood = Flood()
    server = rpc.create_server()
    handlers: dict[str, Any] = {"Connect": grpc.stream_stream_rpc_method_handler(flood.connect)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),)
    )
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    # Without the health that a scheduler has, the channel would never be ready.
    options = [option for option in STREAM_OPTIONS if option[0] != "grpc.service_config"]
    async with rpc.connect(address, options) as channel:
        call: Any = channel.stream_stream(rpc.method_path(SERVICE, "Connect"))()
        assert await soon(call.read())
        n_before = -1
        async with asyncio.timeout(HANG_S):
            while flood.n_sent > n_before:
                n_before = flood.n_sent
                await asyncio.sleep(0.3)
        assert 2 <= flood.n_sent <= 2 + 2 * AHEAD_BYTES / MESSAGE.ByteSize()
        n_read = 1
        while await soon(call.read()) is not grpc.aio.EOF:
            n_read += 1
        assert n_read == N_MESSAGES
    await server.stop(None)
