"""`python -m tests.faults.linked_tree`: `services.local` whose services reach each other over links
that can be cut.

All calls of a frontend to the scheduler go over one link, all calls to a worker over another.
`FAULTS_LINKS` names a socket that takes orders, a line each, such as `worker 1 silence 12`.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from services.common.address import Address, parse
from services.local import __main__ as local
from services.local.child import Child
from services.local.launcher import Launcher, LocalAddresses, OnProgress
from services.local.settings import LocalSettings

SOCKET_VARIABLE = "FAULTS_LINKS"
CHUNK_BYTES = 2**16


class Link:
    """Forwards bytes in both directions, unless it was told not to."""

    def __init__(self, target: str) -> None:
        self._host, self._port = parse(target)
        self._is_cut = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def listen(self) -> str:
        """Returns the address at which the target is reached over this link."""
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return str(Address(self._host, self._server.sockets[0].getsockname()[1]))

    async def aclose(self) -> None:
        """Accepts no more connections, and ends the open ones."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def cut(self, for_s: float) -> None:
        """Ends all connections, and takes none for a time."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(for_s)
        self._is_cut = False

    async def silence(self, for_s: float) -> None:
        """Holds up everything for a time; connections stay."""
        self._flows.clear()
        await asyncio.sleep(for_s)
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if not self._is_cut:
                ours, theirs = await asyncio.open_connection(self._host, self._port)
                await asyncio.gather(self._pump(reader, theirs), self._pump(ours, writer))
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes in one direction. When one direction ends, the other one is ended too."""
        self._writers.add(writer)
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()


class LinkedLauncher(Launcher):
    """Starts the services with links between them."""

    def __init__(self, settings: LocalSettings) -> None:
        super().__init__(settings)
        self._links: dict[str, Link] = {}
        self._linked: dict[str, str] = {}
        self._orders: asyncio.Server

    async def start(self, on_progress: OnProgress) -> LocalAddresses:
        """Starts everything and takes orders, and returns when it serves."""
        self._orders = await asyncio.start_unix_server(self._obey, os.environ[SOCKET_VARIABLE])
        return await super().start(on_progress)

    async def _start_scheduler(self, model: int, workers: list[str]) -> Child:
        linked = [
            await self._link(f"worker {index}", worker) for index, worker in enumerate(workers)
        ]
        return await super()._start_scheduler(model, linked)

    async def _start_frontend(self, schedulers: Sequence[str], **others: Any) -> Child:
        [scheduler] = schedulers  # the links are named for one model
        return await super()._start_frontend([await self._link("scheduler", scheduler)], **others)

    async def _link(self, name: str, target: str) -> str:
        """Returns the address of the link with a name, which all frontends share."""
        if name not in self._links:
            self._links[name] = Link(target)
            self._linked[name] = await self._links[name].listen()
        return self._linked[name]

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries out one order, and reports when this is done."""
        *name, what, for_s = (await reader.readline()).decode().split()
        link = self._links[" ".join(name)]
        await {"cut": link.cut, "silence": link.silence}[what](float(for_s))
        writer.write(b"done\n")
        writer.close()


if __name__ == "__main__":
    sys.exit(local.main(LocalSettings, LinkedLauncher))
