"""The health of a process, under the names that probes ask for.

| name | true while |
|---|---|
| `startup` | it has done what it does once: weights loaded, addresses bound |
| `liveness` | it makes progress itself; never depends on a neighbour |
| `readiness` | it could take work now |
| the API's name, and the empty one | calls of that API are taken |
| `serving` | requests that come now get tokens (`serving.py`); schedulers and frontends only |

Probes ask on a port of its own, which stays without TLS: Kubernetes cannot present a certificate,
and there is nothing else on it.
"""

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import rpc

STARTUP = "startup"
LIVENESS = "liveness"
READINESS = "readiness"
SERVING = "serving"


class Health:
    """The standard gRPC health service of one process. It starts alive, and neither started nor
    ready."""

    def __init__(self, api: str) -> None:
        self._api = api
        self._servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        """Gives every name its first status."""
        await self._set(True, LIVENESS)
        await self._set(False, STARTUP, READINESS, "", self._api)

    async def set_started(self) -> None:
        """Notes that startup is over."""
        await self._set(True, STARTUP)

    async def set_alive(self, is_alive: bool) -> None:
        """Notes whether this process makes progress; if not, Kubernetes restarts it."""
        await self._set(is_alive, LIVENESS)

    async def set_ready(self, is_ready: bool) -> None:
        """Notes whether this process could take work."""
        await self._set(is_ready, READINESS)

    async def set_serving(self, is_serving: bool) -> None:
        """Notes whether calls of the API are taken."""
        await self._set(is_serving, "", self._api)

    async def set_giving_tokens(self, is_giving: bool) -> None:
        """Notes whether requests that come now get tokens."""
        await self._set(is_giving, SERVING)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def listen(self, address: str | None) -> grpc.aio.Server | None:
        """Starts a server for probes with nothing else on it, if an address is given."""
        if address is None:
            return None
        server = rpc.create_server()
        self.add_to(server)
        rpc.bind(server, address)
        await server.start()
        return server

    async def _set(self, is_true: bool, *names: str) -> None:
        statuses = health_pb2.HealthCheckResponse
        for name in names:
            await self._servicer.set(name, statuses.SERVING if is_true else statuses.NOT_SERVING)
