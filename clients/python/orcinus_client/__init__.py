"""A client of Orcinus, with retries and several frontends. When a frontend is lost, its streams go
on through another frontend.

`Attempts` and `StreamedCall` decide which request is made next, and make no connections. So
`Client` and `AsyncClient` differ only in the kind of their waits.
"""

from orcinus_client.async_client import AsyncClient
from orcinus_client.attempts import Retry
from orcinus_client.client import Client
from orcinus_client.errors import (
    ApiError,
    ClientError,
    ConnectionLost,
    GatewayTimedOut,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    RequestFailed,
    TimedOut,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
)
from orcinus_client.stream import Chunk

__all__ = [
    "ApiError",
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientError",
    "ConnectionLost",
    "GatewayTimedOut",
    "InvalidRequest",
    "Overloaded",
    "PermissionDenied",
    "RequestFailed",
    "Retry",
    "TimedOut",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedAnswer",
]
