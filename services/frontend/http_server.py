"""uvicorn as a guest in another's event loop: it neither handles signals nor sets up logs."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of clients that connect at once."""

FINISH_S = 2
"""Seconds for writing out what is already said, after draining."""


class HttpServer(uvicorn.Server):
    """Serves an app on a socket that is bound before anybody hears of it."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=FINISH_S,
            )
        )
        self._listener = listener

    async def run_until_stopped(self) -> None:
        """Serves until `stop`, then finishes what is being written."""
        await self.serve([self._listener])

    def stop(self) -> None:
        """Has `run_until_stopped` return soon."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield


def listen(address: str) -> socket.socket:
    """A socket that listens on `host:port`; port 0 takes a free one.

    Raises:
        OSError: the address is taken or is not one of this machine's.
    """
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server(
            (host.strip("[]"), int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def address_of(listener: socket.socket, address: str) -> str:
    """The `host:port` that clients can use, once it is known."""
    return f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
