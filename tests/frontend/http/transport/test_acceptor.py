"""Connections that cannot be accepted for lack of something."""

import asyncio
import errno
import logging
import os
import socket

import pytest

from services.frontend.http.transport import acceptor
from services.frontend.http.transport.acceptor import Acceptor
from services.frontend.http.transport.connection_limits import ConnectionPlaces
from services.frontend.request.refusals import Refusal, Refusals
from tests.limits import HANG_S


class Exhausted(socket.socket):
    """A listener that has no descriptor for its next connections."""

    n_left = 20

    def accept(self) -> tuple[socket.socket, object]:
        self.n_left -= 1
        if self.n_left >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_a_lack_of_descriptors_is_said_when_it_begins_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(acceptor, "RETRY_S", 0.001)
    refusals = Refusals()
    accepted = asyncio.Event()

    def protocol(place: object) -> asyncio.Protocol:
        accepted.set()
        return asyncio.Protocol()

    with Exhausted() as listener:
        listener.bind(("127.0.0.1", 0))
        accepting = Acceptor(
            listener,
            protocol,
            tls=None,
            handshake_limit_s=1.0,
            places=ConnectionPlaces(2, refusals=refusals),
            refusals=refusals,
        )
        accepting.start(10)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(HANG_S):
            await accepted.wait()
        writer.close()
        accepting.close()
        await accepting.wait_closed()
    first, last = [record.getMessage() for record in caplog.records]
    assert first == "connections cannot be accepted: Too many open files"
    assert last.startswith("connections are accepted again; 20 attempts failed in ")
    assert refusals[Refusal.CONNECTIONS] == 20
