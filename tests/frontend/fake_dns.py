"""A name server that answers every name with the addresses that a test sets."""

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

TYPE_A, TYPE_AAAA = 1, 28
NO_ERROR, NO_SUCH_NAME = 0, 3
HEADER = struct.Struct("!HHHHHH")
IS_ANSWER = 0x8180
NAME_OF_THE_QUESTION = 0xC000 | HEADER.size


class FakeDns(asyncio.DatagramProtocol):
    """Answers every question with `addresses`. If there are none, answers that the name does not
    exist."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = ()
        self.asked = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        self._transport.sendto(self._answer(data), peer)
        self.asked.set()

    def _answer(self, data: bytes) -> bytes:
        end = data.index(0, HEADER.size) + 5  # a name ends with a zero, then come type and class
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        packed = [ipaddress.ip_address(address).packed for address in self.addresses]
        addresses = [it for it in packed if kind == (TYPE_A if len(it) == 4 else TYPE_AAAA)]
        flags = IS_ANSWER | (NO_ERROR if self.addresses else NO_SUCH_NAME)
        (identity,) = struct.unpack("!H", data[:2])
        header = HEADER.pack(identity, flags, 1, len(addresses), 0, 0)
        answers = (
            struct.pack("!HHHIH", NAME_OF_THE_QUESTION, kind, 1, 0, len(address)) + address
            for address in addresses
        )
        return header + data[HEADER.size : end] + b"".join(answers)


@asynccontextmanager
async def fake_dns() -> AsyncIterator[tuple[FakeDns, str]]:
    """Yields a name server and its address, host:port."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(FakeDns, local_addr=("127.0.0.1", 0))
    host, port = transport.get_extra_info("sockname")
    yield server, f"{host}:{port}"
    transport.close()
