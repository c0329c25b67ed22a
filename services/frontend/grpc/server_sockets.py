"""The sockets of a gRPC server, which says nothing of them: found among the process's descriptors.

The descriptors are gRPC's, and stay open. Nothing here changes whether a socket blocks. Linux only.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FDS = Path("/proc/self/fd")

TCP_INFO = struct.Struct("=120xQQ12xI")
"""`tcpi_bytes_acked`, `tcpi_bytes_received` and `tcpi_min_rtt` in `struct tcp_info` of
linux/tcp.h."""

IP_MINTTL, IPV6_MINHOPCOUNT = 21, 73
"""Options of linux/in.h and linux/in6.h that Python does not name."""

ANY_TTL, NO_TTL = 0, 255
"""Least times to live of packets of everybody, and of nobody beyond this network."""

LIBRARY = ctypes.PyDLL(None)
"""The system's calls. None of those here waits, so that other threads need no turn meanwhile."""

SocketAddress = ctypes.c_uint16 * 14
"""A `struct sockaddr_in6`, the longest kind with a port: its second number, in network order."""

NO_ADDRESS = bytes(16)
"""A `struct sockaddr` of the family AF_UNSPEC: connecting to it resets a connection."""

Address = tuple[str, int]


def sockets_at(port: int) -> Iterator[socket.socket]:
    """Yields this process's sockets of a port, each for as long as it is the last one yielded."""
    address, n_bytes, wanted = SocketAddress(), ctypes.c_uint32(), socket.htons(port)
    size = ctypes.byref(n_bytes)
    for descriptor in map(int, os.listdir(FDS)):
        # Most are something else; to make a socket of each takes twice as long.
        n_bytes.value = ctypes.sizeof(address)
        if LIBRARY.getsockname(descriptor, address, size) or address[1] != wanted:
            continue
        with suppress(OSError):  # it is of another kind, or gone
            # Named AF_INET6, whose addresses are longer, it tells both kinds. Neither this nor
            # `detach` changes whether the socket blocks, which it shares with gRPC; `dup` would.
            found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
            try:
                name = found.getsockname()
                if isinstance(name, tuple) and name[1] == port:
                    yield found
            finally:
                found.detach()


def connections_to(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """Yields this process's connections to a port, as `sockets_at`, and their clients'
    addresses."""
    for connection in sockets_at(port):
        with suppress(OSError):  # it listens, or has gone
            yield connection, address_of(connection)


def address_of(connection: socket.socket) -> Address:
    """Returns the address of a connection's client."""
    host, port = connection.getpeername()[:2]
    return host.removeprefix("::ffff:"), port


class Counts(NamedTuple):
    """The kernel's counters of a TCP connection, in bytes, and its shortest round trip."""

    n_acked: int
    """Bytes that its client has taken."""
    n_received: int
    """Bytes that came from it."""
    min_rtt_us: int
    """Microseconds that a byte needs there and back, at least."""


def counts_of(connection: socket.socket) -> Counts:
    """Returns what the kernel has counted of a connection; raises OSError if it is gone, or the
    kernel counts less."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    if len(info) < TCP_INFO.size:
        raise OSError("this kernel's tcp_info is too short")
    return Counts._make(TCP_INFO.unpack(info))


def set_receive_bytes(connection: socket.socket, n_bytes: int) -> None:
    """Sets how much the kernel keeps of what a connection's client sends until it is read."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_bytes)


def hold(connection: socket.socket, address: Address) -> None:
    """Has the kernel take no packet from the connection of an address. Its client sends again what
    is not taken, ever more rarely. A neighbour whose packets come with a time to live of 255 is not
    held. A filter of the socket's would let acknowledgements through, but those of TCP are not for
    everybody."""
    _set_min_ttl(connection, address, NO_TTL)


def release(connection: socket.socket, address: Address) -> None:
    """Has the kernel take packets again from a connection that is held."""
    _set_min_ttl(connection, address, ANY_TTL)


def _set_min_ttl(connection: socket.socket, address: Address, min_ttl: int) -> None:
    if address_of(connection) != address:  # gRPC has closed it, and its descriptor is another's
        return
    if ":" in address[0]:
        connection.setsockopt(socket.IPPROTO_IPV6, IPV6_MINHOPCOUNT, min_ttl)
    else:
        connection.setsockopt(socket.IPPROTO_IP, IP_MINTTL, min_ttl)


def cut(connection: socket.socket) -> None:
    """Resets a connection and drops what it has sent: gRPC does not always look at the end of one
    that goes on sending, as `shutdown` would leave it. gRPC closes the descriptor."""
    LIBRARY.connect(connection.fileno(), NO_ADDRESS, len(NO_ADDRESS))
