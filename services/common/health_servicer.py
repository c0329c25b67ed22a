"""Implements the standard gRPC health service. A slow client never delays a change of status.

The package grpcio-health-checking holds a lock while it writes to a watching client. With this
package, a client that does not read could keep the process from reporting that it stops. Here each
watch sends the latest status when its client has read the previous one. Statuses in between are
skipped, as the protocol allows.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from services.common import errors

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]

MAX_WATCHES = 1024
"""Largest number of watches that a server has at a time. A client of the health service needs one
watch for each of its connections.

Each watch takes about 12 KB, whether it is read or not.
"""

MAX_NAME_LENGTH = 256

RETRY_AFTER_S = 5.0

Status = int
"""A value of `HealthCheckResponse.ServingStatus`."""


class HealthStatuses:
    """Keeps the health status of each name, and wakes the tasks that wait for the next change."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed: asyncio.Future[None] | None = None
        self.has_ended = False
        """Whether the statuses are final, because the process is about to end."""

    def get(self, name: str) -> Status | None:
        """Returns the status of a name. Returns None if it was never set."""
        return self._statuses.get(name)

    def all(self) -> dict[str, Status]:
        """Returns the status of each name whose status was set."""
        return dict(self._statuses)

    def set(self, name: str, status: Status) -> None:
        """Sets a status and wakes the tasks that wait for a change. This method never waits."""
        if self._statuses.get(name) == status:
            return
        self._statuses[name] = status
        self._wake()

    def end(self) -> None:
        """Marks the statuses as final, and wakes the tasks that wait for a change. Open watches
        then end."""
        self.has_ended = True
        self._wake()

    async def wait_change(self) -> None:
        """Waits until a status changes or the statuses are final."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


class HealthServicer:
    """Implements the methods of the health service for one server."""

    def __init__(self, statuses: HealthStatuses, *, max_watches: int = MAX_WATCHES) -> None:
        self._statuses = statuses
        self._max_watches = max_watches
        self.n_watches = 0
        """Number of open watches."""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Answers with the status of a name. Ends the call with NOT_FOUND if the status of this
        name was never set."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no health is told under this name")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, _: health_pb2.HealthListRequest, __: Any) -> health_pb2.HealthListResponse:
        """Answers with the status of every name."""
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=status)
                for name, status in self._statuses.all().items()
            }
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Answers with the status of a name, now and at each change, until the process is about to
        end. The answer is SERVICE_UNKNOWN until the status is set.

        Raises:
            InvalidRequest: the name is longer than any name may be.
            PoolFull: there are too many watches.
        """
        if len(request.service) > MAX_NAME_LENGTH:  # a watch holds it
            raise errors.InvalidRequest(
                "service", f"must not be longer than {MAX_NAME_LENGTH} characters"
            )
        if self.n_watches >= self._max_watches:
            raise errors.PoolFull(
                f"{self._max_watches} watches are open; check instead", retry_after_s=RETRY_AFTER_S
            )
        self.n_watches += 1
        # Called at the end of the call, not of this generator: a watch that is not read lasts until
        # its client disconnects.
        context.add_done_callback(self._forget_watch)
        last = None
        while True:
            status = self._statuses.get(request.service)
            if status is None:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._statuses.has_ended:
                return
            else:
                await self._statuses.wait_change()

    def _forget_watch(self, _: object) -> None:
        self.n_watches -= 1
