"""A proxy that speaks HTTP (`CONNECT`) and SOCKS 5, and records the addresses to which clients
connect through it."""

import base64
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import BaseRequestHandler, ThreadingTCPServer

from tests.limits import HANG_S

SOCKS = b"\x05"


@dataclass(slots=True)
class FakeProxy:
    """The credentials that the proxy demands, and the addresses that it was asked to connect to."""

    password: str | None = None
    """Password that HTTP clients must send, with the user name `user`. None if no password is
    needed."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """For each connection, its kind (`http` or `socks`) and its destination, host:port."""
    address: str = ""

    @contextmanager
    def serving(self) -> Iterator["FakeProxy"]:
        """Serves at a free port until the end of the block, and yields the proxy."""
        handler = type("Handler", (_Handler,), {"proxy": self})
        with ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
            server.daemon_threads = True
            host, port = server.server_address[:2]
            self.address = f"{host!s}:{port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class _Handler(BaseRequestHandler):
    proxy: FakeProxy
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(HANG_S)
        with suppress(OSError):
            is_socks = self.request.recv(1, socket.MSG_PEEK) == SOCKS
            goal = self._socks_goal() if is_socks else self._http_goal()
            if goal is not None:
                self.proxy.asked.append(("socks" if is_socks else "http", goal))
                self._relay(goal)

    def _http_goal(self) -> str | None:
        """Reads a `CONNECT` request and answers it. Returns the destination, host:port, or None if
        the request was refused."""
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.request.recv(4096)
        shown = base64.b64encode(f"user:{self.proxy.password}".encode())
        if self.proxy.password is not None and shown not in head:
            self.request.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return None
        self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return head.split()[1].decode()

    def _socks_goal(self) -> str:
        """Reads and answers the greeting and the request of a SOCKS client. Returns the
        destination, host:port."""
        _, n_methods = self.request.recv(2)
        self.request.recv(n_methods)
        self.request.sendall(b"\x05\x00")  # no authentication
        _, _, _, kind = self.request.recv(4)
        n_bytes = self.request.recv(1)[0] if kind == 3 else 4
        raw = self.request.recv(n_bytes)
        (port,) = struct.unpack(">H", self.request.recv(2))
        self.request.sendall(b"\x05\x00\x00\x01" + bytes(6))
        return f"{raw.decode() if kind == 3 else socket.inet_ntoa(raw)}:{port}"

    def _relay(self, goal: str) -> None:
        host, _, port = goal.rpartition(":")
        with socket.create_connection((host, int(port)), HANG_S) as other:
            back = threading.Thread(target=_copy, args=(other, self.request), daemon=True)
            back.start()
            _copy(self.request, other)
            back.join(HANG_S)


def _copy(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_WR)
