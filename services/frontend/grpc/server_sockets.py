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

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Options of asm-generic/socket.h that Python does not name."""

FILTER = (
    (0x30, 0, 0, 12),  # A = the byte of TCP's header that has the header's length,
    (0x54, 0, 0, 0xF0),
    (0x74, 0, 0, 2),  # in bytes
    (0x07, 0, 0, 0),  # X = A
    (0x80, 0, 0, 0),  # A = length of the segment
    (0x2D, 1, 0, 0),  # A > X: to the last line
    (0x06, 0, 0, 0xFFFF),  # take it
    (0x06, 0, 0, 0),  # drop it
)
"""`struct sock_filter`s of linux/filter.h that drop what brings data, and take acknowledgements."""

_FILTER = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in FILTER))
_FILTER_PROGRAM = struct.pack("@HP", len(FILTER), ctypes.addressof(_FILTER))

LIBRARY = ctypes.CDLL(None)
NO_ADDRESS = bytes(16)
"""A `struct sockaddr` of the family AF_UNSPEC: connecting to it resets a connection."""

Address = tuple[str, int]


def sockets_at(port: int) -> Iterator[socket.socket]:
    """Yields this process's sockets of a port, each for as long as it is the last one yielded."""
    for descriptor in map(int, os.listdir(FDS)):
        with suppress(OSError):  # no socket, or gone
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
    """What the kernel knows of a connection."""

    n_acked: int
    """Bytes that its client has taken."""
    n_received: int
    """Bytes that came from it."""
    min_rtt_us: int
    """Microseconds that a byte needs there and back, at least."""


def counts_of(connection: socket.socket) -> Counts:
    """Returns what the kernel has counted of a connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    return Counts._make(TCP_INFO.unpack(info))


def set_receive_bytes(connection: socket.socket, n_bytes: int) -> None:
    """Sets how much the kernel keeps of what a connection's client sends until it is read."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_bytes)


def hold(connection: socket.socket) -> None:
    """Has the kernel take no more data from a connection. Its client sends again what is not taken,
    ever more rarely; what is sent to it arrives as before."""
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _FILTER_PROGRAM)


def release(connection: socket.socket) -> None:
    """Has the kernel take data again from a connection that is held."""
    connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def cut(connection: socket.socket) -> None:
    """Resets a connection and drops what it has sent: gRPC does not always look at the end of one
    that goes on sending, as `shutdown` would leave it. gRPC closes the descriptor."""
    LIBRARY.connect(connection.fileno(), NO_ADDRESS, len(NO_ADDRESS))
