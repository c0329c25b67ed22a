"""Free addresses on loopback, for servers that are told where to listen and do not report their
address."""

import random
import socket

PORTS = range(20_000, 32_000)
"""Ports that no system gives away by itself, so that no connection of another test has one."""


def free_address() -> str:
    """Returns an address on loopback at which no process listens, as host:port. No other process
    will get the address by chance."""
    while True:
        address = ("127.0.0.1", random.choice(PORTS))
        with socket.socket() as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
        return "{}:{}".format(*address)
