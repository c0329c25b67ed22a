"""One stream to the scheduler that leads: finds the leader, and sends and receives messages.

Several schedulers may have addresses under one DNS name. gRPC checks the health of each and makes
calls only to the scheduler that leads. Each stream has a new channel, which looks the name up and
reads certificates again.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import grpc.aio
from orcinus.v1 import scheduler_pb2

from services.common import rpc

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]

MAX_UNSENT, MAX_UNSENT_BYTES = 4096, 16 * 2**20
"""Limits on the messages that wait to be sent: `MAX_UNSENT` on their number, `MAX_UNSENT_BYTES` on
their size together. Beyond either limit, requests are held instead of sent, so that a scheduler
that does not read cannot fill the memory of this process."""

FIND_LEADER_S = 5.0
"""Seconds for which one channel looks for a leader. The next channel looks the name up again,
because the address of a new scheduler may have been added to the name."""

CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    *rpc.RECONNECT_OPTIONS,
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": SERVICE.full_name},
            }
        ),
    ),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel shares no pause with an old one
    ("grpc.keepalive_time_ms", rpc.KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", rpc.KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", rpc.KEEPALIVE_TIMEOUT_S * 1000),
]
"""gRPC options of the channel. Calls go only to schedulers whose health service says that they
serve. The loss of a scheduler that does not end its connection is noticed within ten seconds, which
is less than the default of `hold_s`."""


AHEAD_BYTES = 4 * 2**10
"""Bytes that a scheduler may send before this process reads them: about fifteen iterations of 32
requests. Results that the scheduler cannot send yet are joined into its next message. gRPC's
default limit grows to megabytes, so that in a busy process tokens and refusals would wait for
seconds behind earlier messages."""

STREAM_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", AHEAD_BYTES),
]


class SchedulerStream:
    """One stream to the scheduler that leads. Each object serves for one stream, until the stream
    breaks."""

    def __init__(self, address: str, connect: rpc.Connect) -> None:
        self._address = address
        self._connect = connect
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._n_unsent_bytes = 0

    @property
    def is_congested(self) -> bool:
        """Whether too many messages wait to be sent because the scheduler reads too slowly."""
        return self._outbox.qsize() >= MAX_UNSENT or self._n_unsent_bytes >= MAX_UNSENT_BYTES

    def send(self, message: scheduler_pb2.ConnectRequest) -> None:
        """Queues a message. The message is lost if the stream breaks before it is sent."""
        data = message.SerializeToString()
        self._outbox.put_nowait(data)
        self._n_unsent_bytes += len(data)

    async def converse(
        self,
        *,
        opened: Callable[[], None],
        received: Callable[[scheduler_pb2.ConnectResponse], None],
    ) -> str:
        """Sends and receives messages until the stream breaks, and returns the reason.

        Calls `opened` once a leading scheduler has been found, then `received` for each message.
        """
        async with self._connect(self._address, STREAM_OPTIONS) as channel:
            await wait_leader(channel)
            call: Any = channel.stream_stream(
                rpc.method_path(SERVICE, "Connect"),
                request_serializer=None,  # messages are bytes here
                response_deserializer=scheduler_pb2.ConnectResponse.FromString,
            )()
            try:
                async with asyncio.TaskGroup() as tasks:
                    writer = tasks.create_task(self._write(call))
                    reason = await _read(call, opened, received)
                    writer.cancel()
                return reason
            finally:
                call.cancel()

    async def _write(self, call: Any) -> None:
        """Sends the queued messages until the stream breaks. The reason of the break is returned by
        `_read`."""
        try:
            while True:
                data = await self._outbox.get()
                await call.write(data)
                self._n_unsent_bytes -= len(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def wait_leader(channel: grpc.aio.Channel) -> None:
    """Waits until a leading scheduler is found, but at most FIND_LEADER_S seconds. If none is
    found, the next call on the channel fails with the reason."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIND_LEADER_S):
            await channel.channel_ready()


async def _read(
    call: Any,
    opened: Callable[[], None],
    received: Callable[[scheduler_pb2.ConnectResponse], None],
) -> str:
    """Receives messages until the stream breaks. Returns the reason why the stream broke."""
    try:
        await call.wait_for_connection()
        opened()
        while (response := await call.read()) is not grpc.aio.EOF:
            if not all([update.HasField("start") for update in response.tokens]):
                return "it is of another version, which cannot say where tokens belong"
            received(response)
    except grpc.aio.AioRpcError as error:
        return error.details() or error.code().name
    return "it ended the stream"
