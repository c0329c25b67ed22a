"""Network addresses, `host:port`: parsing, formatting, and the sockets of servers.

A host is an IPv4 address, an IPv6 address, or a name. If a port follows, an IPv6 address stands in
brackets. Some hosts stand for several addresses of a machine, wherever an address is expected:

| host | addresses |
|---|---|
| `::`, `0.0.0.0`, or nothing | all addresses of the machine, IPv4 and IPv6 |
| `localhost` | both addresses of loopback, `127.0.0.1` and `::1` |

If the machine lacks IPv4 or IPv6, that family is left out. A client that connects by IPv4 to an
IPv6 socket appears there as `::ffff:…`. This module converts such an address to IPv4, so that every
client has one address.
"""

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

MAX_PORT = 65535
LOCALHOST = "localhost"
LOOPBACKS = ("127.0.0.1", "::1")
"""The addresses of loopback in order of preference: IPv4, then IPv6."""

EVERY_IPV4, EVERY_IPV6 = "0.0.0.0", "::"
WILDCARDS = frozenset({EVERY_IPV4, EVERY_IPV6})

_PATTERN = re.compile(r"(?:\[(?P<ipv6>[^]\s]*)]|(?P<host>[^]\[\s:/]*)):(?P<port>\d{1,5})")
_IPV6_WITHOUT_BRACKETS = re.compile(r"[0-9a-fA-F.:]*:[0-9a-fA-F.]*:[^]\[\s]*")
_MAPPED = "::ffff:"
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Errors that `bind` raises for an address that this machine does not have."""


class Address(NamedTuple):
    """A host, without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Returns the address that a text `host:port` names. If the host is left out, it is `::`.

    Raises:
        ValueError: the text is not `host:port`.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        if _IPV6_WITHOUT_BRACKETS.fullmatch(text):
            raise ValueError(f"{text!r}: an IPv6 address stands in brackets, as in [::1]:8000")
        raise ValueError(f"{text!r} is not host:port")
    if (port := int(found["port"])) > MAX_PORT:
        raise ValueError(f"{text!r}: there is no port above {MAX_PORT}")
    if found["ipv6"] is not None:
        return Address(_ipv6(found["ipv6"]), port)
    return Address(found["host"] or EVERY_IPV6, port)


def parse_host(text: str) -> str:
    """Returns the host that `text` names. Brackets around the host are removed.

    Raises:
        ValueError: the text is neither an IP address nor a name.
    """
    if ":" in text:
        return _ipv6(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    if not re.fullmatch(r"[^]\[\s/]+", text):
        raise ValueError(f"{text!r} is neither an IP address nor a name")
    return text


def loopback() -> str:
    """Returns an address of this machine that only this machine reaches: `127.0.0.1`, or `::1` if
    the machine has no IPv4.

    Raises:
        OSError: the machine has neither of the two addresses.
    """
    return _here(LOOPBACKS)[0]


def reserve_port(host: str) -> socket.socket:
    """Returns a socket that reserves a free port for a server that starts later. `host` must be an
    IP address of this machine. The port is reserved until the socket is closed. Connections to the
    port are refused meanwhile.

    Raises:
        OSError: the machine does not have the address `host`.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reserved.bind((host, 0))
    except OSError:
        reserved.close()
        raise
    return reserved


def own_ip(host: str) -> str:
    """Returns the IP address by which other processes connect to this machine. `host` is a setting:
    an IP address, or `localhost`, for which the loopback address is returned.

    Raises:
        ValueError: the host is another name, stands for several addresses, or is `localhost` on a
            machine without a loopback address.
    """
    if host == LOCALHOST:
        try:
            return loopback()
        except OSError as error:
            raise ValueError(f"{host}: {reason_of(error)}") from error
    if host in WILDCARDS:
        raise ValueError(f"{host} is no address at which another machine reaches this one")
    if not _is_ip(host):
        raise ValueError(f"{host} is no IP address")
    return host


def reachable(address: Address) -> Address:
    """Returns an address at which clients on this machine reach a server that listens on `address`.

    Raises:
        OSError: the machine has no loopback address.
    """
    is_several = address.host in WILDCARDS or address.host == LOCALHOST
    return Address(loopback(), address.port) if is_several else address


def places(address: Address) -> list[Address]:
    """Returns the IP addresses, with ports, on which a server must listen for clients to reach it
    at `address`. All have the port of `address`. If this port is 0, a single address keeps port 0,
    and several addresses get one port that is free on all of them.

    Raises:
        OSError: the host of `address` is a name that has no address of this machine, or no port is
            free on all of its addresses.
    """
    hosts = _hosts(address.host)
    port = address.port
    if port == 0 and len(hosts) > 1:
        port = _free_port(hosts)
    return [Address(host, port) for host in hosts]


def listen(address: str, *, backlog: int = 128, is_shared: bool = False) -> list[socket.socket]:
    """Returns sockets that listen on `host:port`, all on one port. Port 0 stands for any free port.
    `backlog` is the number of connections that may wait to be accepted. If `is_shared`, other
    processes of the same user may listen on the port, too, if they share it: the kernel gives each
    new connection to one of them.

    Raises:
        OSError: the address is in use, or is not one of this machine's.
        ValueError: the address is not `host:port`.
    """
    with contextlib.ExitStack() as opened:
        try:
            listeners = [
                opened.enter_context(_listener(place, backlog, is_shared=is_shared))
                for place in places(parse(address))
            ]
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {reason_of(error)}") from error
        opened.pop_all()
        return listeners


def bound_address(listeners: Sequence[socket.socket], address: str) -> str:
    """Returns the `host:port` at which clients reach `listeners`. The host is taken from `address`,
    and the port from the sockets."""
    return str(parse(address)._replace(port=listeners[0].getsockname()[1]))


def reason_of(error: OSError) -> str:
    """Returns the operating system's message for an error, without the network address that asyncio
    and sockets append to it."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def of_socket(name: Any) -> Address:
    """Returns the address of a client. `name` is the result of `getpeername` for the client's
    connection."""
    return Address(_plain(name[0]), name[1])


def of_grpc_peer(peer: str) -> Address | None:
    """Converts gRPC's name of a client, such as `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`, to the
    client's address. Returns None for a client of a Unix socket, which has no address."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return Address(_plain(host.strip("[]")), int(port)) if port.isdecimal() else None


def _plain(host: str) -> str:
    """Returns `host` without the zone of a link-local address. An IPv4 address that is written as
    IPv6, such as `::ffff:1.2.3.4`, is returned as IPv4."""
    host = host.partition("%")[0]
    return host[len(_MAPPED) :] if host.startswith(_MAPPED) and "." in host else host


def _ipv6(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError(f"{text!r} is no IPv6 address") from None
    return text


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _hosts(host: str) -> list[str]:
    """Returns the IP addresses on which a server must listen for `host`."""
    if host in WILDCARDS:
        return [EVERY_IPV6 if _has_dual_stack() else EVERY_IPV4]
    if host == LOCALHOST:
        return _here(LOOPBACKS)
    if _is_ip(host):
        return [host]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return _here(dict.fromkeys(str(name[0]) for *_, name in found))


def _here(hosts: Iterable[str]) -> list[str]:
    """Returns the addresses in `hosts` that belong to this machine.

    Raises:
        OSError: no address in `hosts` belongs to this machine.
    """
    found = [host for host in hosts if _is_here(host)]
    if not found:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return found


def _is_here(host: str) -> bool:
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    return True


def _has_dual_stack() -> bool:
    """Returns whether one socket can accept connections of both IPv4 and IPv6."""
    return socket.has_dualstack_ipv6() and _is_here(EVERY_IPV6)


def _free_port(hosts: Sequence[str]) -> int:
    """Returns a port that is free on all addresses in `hosts`.

    Raises:
        OSError: no such port was found.
    """
    for _ in range(100):
        with _listener(Address(hosts[0], 0), 1) as first:
            port: int = first.getsockname()[1]
            if all(_is_free(Address(host, port)) for host in hosts[1:]):
                return port
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _is_free(place: Address) -> bool:
    try:
        _listener(place, 1).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def _listener(place: Address, backlog: int, *, is_shared: bool = False) -> socket.socket:
    return socket.create_server(
        (place.host, place.port),
        family=_family(place.host),
        backlog=backlog,
        reuse_port=is_shared,
        dualstack_ipv6=place.host == EVERY_IPV6,
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
