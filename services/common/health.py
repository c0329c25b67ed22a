"""The health of a process: a status for each name that probes may request.

| name | true while |
|---|---|
| `startup` | the start is complete: weights loaded, addresses bound |
| `liveness` | the process makes progress; never depends on other processes |
| `readiness` | the process could take work now |
| the API's name, and the empty name | calls of that API are accepted |
| `serving` | requests that arrive now get tokens (`serving.py`); schedulers and frontends only |

Probes by gRPC use a separate port, which serves nothing else. The port has no TLS, because
Kubernetes cannot present a certificate. Probes by HTTP, for versions of Kubernetes without gRPC
probes, use the port of the metrics (`metrics.py`).
"""

from functools import partial

import grpc.aio
from grpc_health.v1 import health_pb2

from services.common import rpc, rpc_handlers
from services.common.exchange import TimedExchange
from services.common.health_servicer import SERVICE, HealthServicer, HealthStatuses

STARTUP = "startup"
LIVENESS = "liveness"
READINESS = "readiness"
SERVING = "serving"

_TIMED = partial(TimedExchange, receive_limit_s=10.0, send_limit_s=30.0)
"""Makes an exchange with timeouts. The messages have a few bytes, so they are slow only if the peer
hangs."""


class Health:
    """The health of one process, as the standard gRPC health service reports it. After `start`, the
    process counts as alive, but not as started or ready."""

    def __init__(self, api: str) -> None:
        self._api = api
        self._statuses = HealthStatuses()

    async def start(self) -> None:
        """Sets the first status of each name except `serving`: `liveness` is serving, and all other
        names are not."""
        await self._set(True, LIVENESS)
        await self._set(False, STARTUP, READINESS, "", self._api)

    async def set_started(self) -> None:
        """Sets the status of the name `startup` to serving. Call it when the start is complete."""
        await self._set(True, STARTUP)

    async def set_alive(self, is_alive: bool) -> None:
        """Sets whether this process makes progress. If it does not, Kubernetes restarts it."""
        await self._set(is_alive, LIVENESS)

    async def set_ready(self, is_ready: bool) -> None:
        """Sets whether this process could take work."""
        await self._set(is_ready, READINESS)

    async def set_serving(self, is_serving: bool) -> None:
        """Sets whether calls of the API are accepted: the status of the API's name and of the empty
        name."""
        await self._set(is_serving, "", self._api)

    async def set_giving_tokens(self, is_giving: bool) -> None:
        """Sets whether requests that arrive now get tokens: the status of the name `serving`."""
        await self._set(is_giving, SERVING)

    def is_healthy(self, name: str) -> bool | None:
        """Returns whether the status of a name is serving, or None if the name is unknown. May be
        called from any thread."""
        status = self._statuses.get(name)
        return None if status is None else status == health_pb2.HealthCheckResponse.SERVING

    def end(self) -> None:
        """Ends all open watches (calls of `Watch`) after they have sent the last status. Otherwise
        a server that waits for its calls to end would wait for the watches."""
        self._statuses.end()

    def add_to(
        self, server: grpc.aio.Server, *, exchange: rpc_handlers.MakeExchange = _TIMED
    ) -> None:
        """Adds the health service to a gRPC server. The limit on watches holds for each server
        separately. `exchange` makes the object that receives and sends the messages of a call."""
        handler = rpc_handlers.service_handler(
            SERVICE, HealthServicer(self._statuses), exchange=exchange
        )
        server.add_generic_rpc_handlers((handler,))

    async def listen(self, address: str | None) -> grpc.aio.Server | None:
        """Starts and returns a server for probes on `address`. The server serves only the health.
        Returns None if `address` is None."""
        if address is None:
            return None
        server = rpc.create_server(rpc.PROBE_SERVER_OPTIONS)
        self.add_to(server)
        rpc.bind(server, address)
        await server.start()
        return server

    async def _set(self, is_true: bool, *names: str) -> None:
        statuses = health_pb2.HealthCheckResponse
        for name in names:
            self._statuses.set(name, statuses.SERVING if is_true else statuses.NOT_SERVING)
