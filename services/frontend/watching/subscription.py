"""A subscription to the events of the scheduler that leads.

The leader is found in the same way as for requests (`scheduler_stream`), on a separate channel.
When the stream breaks, another stream begins after a pause.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from orcinus.v1 import watch_pb2

from services.common import rpc
from services.frontend.link.backoff import Backoff
from services.frontend.link.scheduler_stream import CHANNEL_OPTIONS, wait_leader

log = logging.getLogger(__name__)

SERVICE = watch_pb2.DESCRIPTOR.services_by_name["WatchService"]

NO_LEADER = "no scheduler leads at the moment"

REASONS = {
    grpc.StatusCode.UNIMPLEMENTED: "the scheduler is of a version that cannot be watched",
    grpc.StatusCode.PERMISSION_DENIED: "the scheduler does not let this frontend watch",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the scheduler lets no more watch, or was not kept up with",
}
"""Texts that tell viewers why a stream broke, keyed by gRPC status. The messages of gRPC are not
shown, because they contain addresses."""


class EventReceiver(Protocol):
    """The receiver of the events of a subscription."""

    def opened(self) -> None:
        """Called when a stream of events begins. The events of the stream replace all earlier
        events."""

    def received(self, events: Sequence[watch_pb2.WatchEvent], /) -> None:
        """Called with events of the scheduler, in the order in which they happened."""

    def lost(self, reason: str, /) -> None:
        """Called when the stream has broken or could not begin. `reason` is an explanation for
        people."""


class Subscription:
    """A stream of events that is opened again whenever it breaks."""

    def __init__(
        self, address: str, *, connect: rpc.Connect = rpc.connect, backoff: Backoff | None = None
    ) -> None:
        self._address = address
        self._connect = connect
        self._backoff = backoff or Backoff()
        self._is_open = False

    async def run(self, watcher: EventReceiver, *, has_decisions: bool) -> NoReturn:
        """Passes events to `watcher` until cancelled. With `has_decisions`, events about decisions
        of the scheduling core are included."""
        n_failures = 0
        while True:
            self._is_open = False
            error = await self._watch(watcher, has_decisions=has_decisions)
            n_failures = 1 if self._is_open else n_failures + 1
            if n_failures == 1:
                details = "it ended the stream" if error is None else error.details()
                log.info("no events of the scheduler at %s: %s", self._address, details)
            watcher.lost(NO_LEADER if error is None else REASONS.get(error.code(), NO_LEADER))
            await asyncio.sleep(self._backoff.pause_s(n_failures))

    async def _watch(
        self, watcher: EventReceiver, *, has_decisions: bool
    ) -> grpc.aio.AioRpcError | None:
        """Receives events until the stream breaks, and returns the error that broke it. Returns
        None if the scheduler ended the stream."""
        async with self._connect(self._address, CHANNEL_OPTIONS) as channel:
            await wait_leader(channel)
            call: Any = channel.unary_stream(
                rpc.method_path(SERVICE, "Watch"),
                request_serializer=watch_pb2.WatchRequest.SerializeToString,
                response_deserializer=watch_pb2.WatchResponse.FromString,
            )(watch_pb2.WatchRequest(has_decisions=has_decisions))
            try:
                await call.wait_for_connection()
                self._is_open = True
                watcher.opened()
                while (response := await call.read()) is not grpc.aio.EOF:
                    watcher.received(response.events)
            except grpc.aio.AioRpcError as error:
                return error
            finally:
                call.cancel()
        return None
