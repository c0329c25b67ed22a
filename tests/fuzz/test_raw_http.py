"""Made-up bytes on the HTTP port: heads and bodies whose parts contradict each other."""

import json
import re
import select
import socket
from typing import Any

from tests.fuzz import hints, rounds
from tests.fuzz.choices import Choices, examples
from tests.fuzz.conftest import SETTLE_S, System
from tests.fuzz.rounds import Inputs

METHODS = (b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"CONNECT", b"TRACE", b"X" * 40, b"", b"p")
TARGETS = (
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/v1/models",
    b"/v1/models/%00%ff..%2f",
    b"/health",
    b"/openapi.json?x=1#y",
    b"http://other/v1/models",
    b"*",
    b"//",
    b"/" + b"a" * 9000,
    b"/\xff",
    b"",
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"")
NAMES = (
    *("content-length", "transfer-encoding", "host", "connection", "expect", "upgrade", "te"),
    *("authorization", "last-event-id", "traceparent", "content-type", "content-encoding"),
    *("", "x y", "cookie", "proxy-connection", "http2-settings", "x" * 300),
)
VALUES = (
    *("0", "5", "17", "-1", "1e3", "0x10", "18446744073709551616", "9" * 400, "5, 5", "1_0"),
    *("chunked", "gzip, chunked", "identity", "close", "keep-alive", "upgrade", "100-continue"),
    *("h2c", "websocket", "x", "a b", "", "\t", "x" * 9000, "0123456789abcdef" * 2 + ":1,-,2f"),
)
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
PAUSE_S = 0.1
"""Seconds without an answer after which a client closes its side."""

NOT_IMPLEMENTED = {501, 505}
"""Statuses from 500 on that say that the client is wrong."""


def request(choices: Choices) -> bytes:
    """Returns a request, or what looks like one; one in three is honest but for its body."""
    is_honest = choices.below(3) == 0
    method, target, version = b"POST", choices.one_of(TARGETS[:2]), b"HTTP/1.1"
    if not is_honest:
        method = choices.one_of(METHODS) if choices.one_in(3) else method
        target = choices.one_of(TARGETS) if choices.one_in(2) else target
        version = choices.one_of(VERSIONS) if choices.one_in(3) else version
    body = _body(choices, is_chat=target == TARGETS[1])
    headers = [("host", "x"), ("content-length", str(len(body)))]
    if is_honest:
        headers.append(("connection", "close"))
        return _joined(b" ".join((method, target, version)), headers, body, b"\r\n")
    if choices.one_in(4):
        del headers[choices.below(2)]
    headers += choices.several(4, lambda: (choices.one_of(NAMES), _value(choices)))
    end = choices.one_of([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n "])
    data = _joined(b" ".join((method, target, version)), headers, body, end)
    if choices.one_in(6):
        at = choices.below(len(data))
        data = data[:at] + choices.take(choices.below(4)) + data[at + choices.below(4) :]
    return data


def _joined(head: bytes, headers: list[tuple[str, str]], body: bytes, end: bytes) -> bytes:
    lines = [head, *(f"{name}: {value}".encode() for name, value in headers)]
    return end.join(lines) + b"\r\n\r\n" + body


def _value(choices: Choices) -> str:
    return hints.header_value(choices) if choices.one_in(4) else choices.one_of(VALUES)


def _body(choices: Choices, *, is_chat: bool) -> bytes:
    if choices.one_in(8):
        return choices.text(40).encode(errors="replace")
    if choices.one_in(8):
        data = choices.take(choices.below(20))
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    body: dict[str, Any] = {"max_tokens": 1 + choices.below(5), "stream": choices.one_in(2)}
    if is_chat:
        body["messages"] = [{"role": "user", "content": choices.text()}]
    else:
        body["prompt"] = [1 + choices.below(300)]
    if choices.one_in(4):
        body[choices.text()] = choices.text()
    data = json.dumps(body).encode()
    return data[: choices.below(len(data))] if choices.one_in(8) else data


def requests_of(choices: Choices) -> list[bytes]:
    """Returns requests that come on one connection, one behind the other."""
    return [request(choices), *choices.several(2, lambda: request(choices))]


def answers_to(data: bytes, address: tuple[str, int]) -> list[int]:
    """Sends bytes, reads until the server closes, and returns the statuses of its answers. A
    server that waits for more is told that no more will come."""
    received = bytearray()
    with socket.create_connection(address, timeout=SETTLE_S) as connection:
        try:
            connection.sendall(data)
            if not select.select([connection], [], [], PAUSE_S)[0]:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(2**16):
                received += chunk
                if not select.select([connection], [], [], PAUSE_S)[0]:
                    connection.shutdown(socket.SHUT_WR)
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server has heard enough
    return [int(status) for status in STATUS.findall(received)]


def test_no_bytes_are_a_bug_or_keep_the_server_waiting(unharmed: System) -> None:
    inputs = Inputs("HTTP as bytes", share=0.25)
    host, _, port = unharmed.stack.http.removeprefix("http://").rpartition(":")

    def check(made: list[bytes]) -> None:
        statuses = answers_to(b"".join(made), (host, int(port)))
        inputs.add(len(made), str(statuses[0]) if statuses else "closed")
        assert all(status < 500 or status in NOT_IMPLEMENTED for status in statuses), statuses

    rounds.run(check, examples(requests_of), inputs)
