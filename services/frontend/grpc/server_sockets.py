"""Finds the sockets of a gRPC server among this process's file descriptors, reads their counters,
and holds back or resets connections.

gRPC does not reveal its sockets. The descriptors belong to gRPC and stay open, and this module does
not change whether a socket blocks. ctypes calls two functions of the C library. One is
`getsockname`: to make a Python socket of each descriptor instead takes twice as long (64 ms instead
of 36 ms for 3,000 descriptors). The other is `connect` without an address, which Python does not
offer. The module works on Linux only.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from services.common.address import Address, of_socket

FDS = Path("/proc/self/fd")

TCP_INFO = struct.Struct("=120xQQ12xI")
"""Layout of `struct tcp_info` of linux/tcp.h up to the last of the fields `tcpi_bytes_acked`,
`tcpi_bytes_received` and `tcpi_min_rtt`."""

IP_MINTTL, IPV6_MINHOPCOUNT = 21, 73
"""Socket options of linux/in.h and linux/in6.h that Python does not name."""

ANY_TTL, NO_TTL = 0, 255
"""Smallest time to live (TTL) that the kernel accepts of a packet: with ANY_TTL it accepts all
packets, with NO_TTL only those that passed no router."""

LIBRARY = ctypes.PyDLL(None)
"""The C library. No function called here blocks, so the calls keep Python's global lock."""

SocketAddress = ctypes.c_uint16 * 14
"""A `struct sockaddr_in6`, the longest address that has a port. The port is the second of its
16-bit numbers, in network order."""

NO_ADDRESS = bytes(16)
"""A `struct sockaddr` of the family AF_UNSPEC. Connecting a socket to this address resets the
connection of the socket."""


def sockets_at(port: int) -> Iterator[socket.socket]:
    """Yields the sockets of this process whose local port is `port`. A socket may be used until the
    next socket is yielded."""
    address, n_bytes, wanted = SocketAddress(), ctypes.c_uint32(), socket.htons(port)
    size = ctypes.byref(n_bytes)
    for descriptor in map(int, os.listdir(FDS)):
        n_bytes.value = ctypes.sizeof(address)
        if LIBRARY.getsockname(descriptor, address, size) or address[1] != wanted:
            continue
        with suppress(OSError):  # the descriptor is of another kind, or has been closed
            # An AF_INET6 socket can read addresses of both families, since IPv6 addresses are the
            # longer ones. Neither this call nor `detach` changes whether the socket blocks; `dup`
            # would.
            found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
            try:
                name = found.getsockname()
                if isinstance(name, tuple) and name[1] == port:
                    yield found
            finally:
                found.detach()


def connections_to(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """Yields the connections of this process whose local port is `port`, with the addresses of
    their clients. A socket may be used until the next socket is yielded."""
    for connection in sockets_at(port):
        with suppress(OSError):  # the socket listens, or its connection has gone
            yield connection, address_of(connection)


def address_of(connection: socket.socket) -> Address:
    """Returns the address of a connection's client."""
    return of_socket(connection.getpeername())


class Counts(NamedTuple):
    """Counters that the kernel keeps for a TCP connection."""

    n_acked: int
    """Number of bytes that the client has acknowledged."""
    n_received: int
    """Number of bytes that came from the client."""
    min_rtt_us: int
    """Shortest round trip in microseconds."""


def counts_of(connection: socket.socket) -> Counts:
    """Returns the counters of a connection.

    Raises:
        OSError: the connection is gone, or the kernel does not have all counters.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    if len(info) < TCP_INFO.size:
        raise OSError("this kernel's tcp_info is too short")
    return Counts._make(TCP_INFO.unpack(info))


def set_receive_bytes(connection: socket.socket, n_bytes: int) -> None:
    """Sets the size, in bytes, of the kernel's receive buffer of a connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_bytes)


def hold(connection: socket.socket, address: Address) -> None:
    """Makes the kernel drop most packets that the client of a connection sends, by setting the
    smallest time to live (TTL) of accepted packets to 255. The client then sends the packets again
    at growing intervals. Packets with a TTL of 255 are still accepted, but only a neighbour with no
    router between can send them. Does nothing if the socket no longer belongs to the connection of
    `address`. A socket filter could drop all packets but acknowledgements, but attaching a filter
    to a TCP socket needs a capability."""
    _set_min_ttl(connection, address, NO_TTL)


def release(connection: socket.socket, address: Address) -> None:
    """Makes the kernel accept all packets of a held connection again. Does nothing if the socket no
    longer belongs to the connection of `address`."""
    _set_min_ttl(connection, address, ANY_TTL)


def _set_min_ttl(connection: socket.socket, address: Address, min_ttl: int) -> None:
    if address_of(connection) != address:  # closed by gRPC; its descriptor is reused
        return
    if ":" in address.host:
        connection.setsockopt(socket.IPPROTO_IPV6, IPV6_MINHOPCOUNT, min_ttl)
    else:
        connection.setsockopt(socket.IPPROTO_IP, IP_MINTTL, min_ttl)


def cut(connection: socket.socket) -> None:
    """Resets a connection and drops the bytes that its client has sent. `shutdown` would not
    suffice: gRPC may not notice the end of a connection on which bytes keep coming. gRPC itself
    closes the descriptor afterwards."""
    LIBRARY.connect(connection.fileno(), NO_ADDRESS, len(NO_ADDRESS))
