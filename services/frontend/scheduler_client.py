"""The frontend's one stream to the scheduler.

Requests and cancellations go up; what an iteration brings comes down in one message and is handed
to the inboxes of the requests it concerns. When the stream breaks, every request on it has failed
(the scheduler cancels what a lost frontend had), and the client connects again for as long as it
runs.
"""

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from orcinus.v1 import scheduler_pb2

from services.common import errors, rpc
from services.frontend.scheduler_events import Event, Failed, Pipeline, events_of

log = logging.getLogger(__name__)

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]

RECONNECT_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
"""gRPC's own pauses, up to two minutes by default, would hide a scheduler that is back."""

STOPPING = "the server is stopping"

MAX_UNSENT = 4096
"""Messages that may wait to be sent when another request comes: a scheduler that doesn't read must
not fill this process's memory."""

Inbox = asyncio.Queue[Event]
"""Where the events of a request, or of several that belong together, are put."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts to connect; they grow, and they differ between frontends."""

    first_s: float = 0.05
    max_s: float = 1.0

    def pause_s(self, n_failures: int) -> float:
        """The pause after so many failures in a row, at least one."""
        longest = min(self.max_s, self.first_s * 2.0 ** min(n_failures - 1, 16))
        return random.uniform(longest / 2, longest)


class SchedulerClient:
    """Submits requests and delivers what becomes of them."""

    def __init__(self, address: str, *, backoff: Backoff | None = None) -> None:
        self._address = address
        self._backoff = backoff or Backoff()
        self._inboxes: dict[str, Inbox] = {}
        self._outbox: asyncio.Queue[scheduler_pb2.ConnectRequest] = asyncio.Queue()
        self._pipeline: Pipeline | None = None
        self._is_closed = False
        self._connected = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._disconnected.set()

    @property
    def is_connected(self) -> bool:
        """Whether requests can be submitted."""
        return self._pipeline is not None

    @property
    def pipeline(self) -> Pipeline:
        """What is served.

        Raises:
            Unavailable: there is no scheduler, or it has not described its pipeline yet.
        """
        if self._pipeline is None:
            raise errors.Unavailable(STOPPING if self._is_closed else "no pipeline; try again")
        return self._pipeline

    async def wait_ready(self) -> None:
        """Waits until requests can be submitted."""
        await self._connected.wait()

    async def wait_lost(self) -> None:
        """Waits until requests can't be submitted."""
        await self._disconnected.wait()

    def submit(self, submission: scheduler_pb2.Submission, inbox: Inbox) -> None:
        """Sends a request; its events go to the inbox until it ends or is cancelled.

        Raises:
            Unavailable: there is no pipeline, or the scheduler reads too slowly.
        """
        _ = self.pipeline
        if self._outbox.qsize() >= MAX_UNSENT:
            raise errors.Unavailable("the scheduler does not keep up; try again")
        self._inboxes[submission.request_id] = inbox
        self._outbox.put_nowait(scheduler_pb2.ConnectRequest(submission=submission))

    def cancel(self, request_id: str) -> None:
        """Ends a request if it still runs; nothing of it is delivered any more."""
        if self._inboxes.pop(request_id, None) is not None:
            cancellation = scheduler_pb2.Cancellation(request_id=request_id)
            self._outbox.put_nowait(scheduler_pb2.ConnectRequest(cancellation=cancellation))

    def close(self) -> None:
        """Ends all requests as unavailable and takes no more."""
        self._is_closed = True
        self._lose(STOPPING)

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        n_failures = 0
        options = [*rpc.CHANNEL_OPTIONS, *RECONNECT_OPTIONS]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            while True:
                reason = await self._converse(channel)
                n_failures = 1 if self.is_connected else n_failures + 1
                if n_failures == 1:
                    # At first there is nothing wrong: the pipeline has yet to form.
                    level = logging.WARNING if self.is_connected else logging.INFO
                    log.log(level, "no scheduler at %s: %s", self._address, reason)
                self._lose("the scheduler was lost; try again")
                await asyncio.sleep(self._backoff.pause_s(n_failures))

    async def _converse(self, channel: grpc.aio.Channel) -> str:
        """Holds one stream until it breaks; returns why it did."""
        self._outbox = asyncio.Queue()
        call = channel.stream_stream(
            rpc.method_path(SERVICE, "Connect"),
            request_serializer=scheduler_pb2.ConnectRequest.SerializeToString,
            response_deserializer=scheduler_pb2.ConnectResponse.FromString,
        )()
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(_write(call, self._outbox))
                reason = await self._read(call)
                writer.cancel()
            return reason
        finally:
            call.cancel()

    async def _read(self, call: Any) -> str:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._apply(response)
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        return "it ended the stream"

    def _apply(self, response: scheduler_pb2.ConnectResponse) -> None:
        if response.HasField("pipeline") and not self._is_closed:
            self._describe(Pipeline.from_proto(response.pipeline))
        for event in events_of(response):
            self._deliver(event)

    def _describe(self, pipeline: Pipeline) -> None:
        if pipeline != self._pipeline:
            log.info("scheduler at %s serves %s", self._address, pipeline)
        self._pipeline = pipeline
        self._disconnected.clear()
        self._connected.set()

    def _deliver(self, event: Event) -> None:
        inbox = self._inboxes.get(event.request_id)
        if inbox is None:
            return  # cancelled a moment ago
        if event.is_last:
            del self._inboxes[event.request_id]
        inbox.put_nowait(event)

    def _lose(self, message: str) -> None:
        self._pipeline = None
        self._connected.clear()
        self._disconnected.set()
        for request_id, inbox in self._inboxes.items():
            inbox.put_nowait(Failed(request_id, errors.Unavailable(message)))
        self._inboxes.clear()


async def _write(call: Any, outbox: asyncio.Queue[scheduler_pb2.ConnectRequest]) -> None:
    """Sends what is put into the outbox, until the stream breaks; the reader says why it did."""
    try:
        while True:
            await call.write(await outbox.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
