"""Addresses as people write them, and servers on both families of addresses."""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from services.common import address
from services.common.address import Address, bound_address, listen, parse, parse_host
from tests.limits import HANG_S


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("[::1]:8000", Address("::1", 8000)),
        ("[fe80::1%eth0]:1", Address("fe80::1%eth0", 1)),
        ("orcinus-scheduler.orcinus.svc:50052", Address("orcinus-scheduler.orcinus.svc", 50052)),
        ("[::]:0", Address("::", 0)),
        (":65535", Address("::", 65535)),
    ],
    ids=str,
)
def test_an_address_is_read_and_written(text: str, expected: Address) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("::1:8000", r"an IPv6 address stands in brackets, as in \[::1\]:8000"),
        ("fe80::1%eth0:1", "an IPv6 address stands in brackets"),
        ("[::1]", "is not host:port"),
        ("[host]:1", "'host' is no IPv6 address"),
        ("[127.0.0.1]:1", "is no IPv6 address"),
        ("host", "is not host:port"),
        ("host:http", "is not host:port"),
        ("http://host:1", "is not host:port"),
        ("a host:1", "is not host:port"),
        ("host:65536", "there is no port above 65535"),
        ("", "is not host:port"),
    ],
    ids=str,
)
def test_what_is_no_address_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)


@pytest.mark.parametrize("text", ["::1", "[::1]"])
def test_brackets_of_a_host_are_left_out(text: str) -> None:
    assert parse_host(text) == "::1"


@pytest.mark.parametrize("text", ["", "[host]", "::g", "a b", "http://host", "host:1"], ids=str)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no IPv6 address|neither an IP address nor a name"):
        parse_host(text)


@pytest.mark.parametrize("text", ["[::]:0", "0.0.0.0:0", ":0", "localhost:0"])
def test_both_families_reach_a_server_that_names_none(text: str) -> None:
    with listening(text) as (listeners, port):
        for host in ("127.0.0.1", "::1"):
            assert peer_at(listeners, host, port).host == host


@pytest.mark.parametrize(
    ("text", "host", "other"),
    [("127.0.0.1:0", "127.0.0.1", "::1"), ("[::1]:0", "::1", "127.0.0.1")],
)
def test_an_address_of_one_family_is_reached_by_that_one(text: str, host: str, other: str) -> None:
    with listening(text) as (listeners, port):
        assert peer_at(listeners, host, port).host == host
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=HANG_S)


@contextmanager
def listening(text: str) -> Iterator[tuple[Sequence[socket.socket], int]]:
    """Listeners at an address, and their port."""
    with ExitStack() as opened:
        listeners = [opened.enter_context(listener) for listener in listen(text)]
        port = parse(bound_address(listeners, text)).port
        assert {listener.getsockname()[1] for listener in listeners} == {port}
        yield listeners, port


def peer_at(listeners: Sequence[socket.socket], host: str, port: int) -> Address:
    """Connects to an address, and returns what the server takes for the client's."""
    with socket.create_connection((host, port), timeout=HANG_S) as client:
        for listener in listeners:
            listener.setblocking(False)
            try:
                accepted, name = listener.accept()
            except BlockingIOError:
                continue
            with accepted:
                assert name[1] == client.getsockname()[1]
                return address.of_socket(name)
    raise AssertionError("no listener has the client")


def test_an_address_that_is_taken_is_named_even_if_the_other_family_is_free() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on localhost:{port}: Address already"):
            listen(f"localhost:{port}")
        with pytest.raises(OSError, match=rf"cannot listen on \[::1\]:{port}: Address already"):
            listen(f"[::1]:{port}")


@pytest.mark.parametrize("text", ["203.0.113.1:0", "[2001:db8::1]:0"])
def test_an_address_of_another_machine_is_named(text: str) -> None:
    with pytest.raises(OSError, match=r"cannot listen on .*: Cannot assign requested address"):
        listen(text)


def test_a_name_that_is_not_known_is_told() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert address.reason_of(error) == "Name or service not known"


class OneFamily(socket.socket):
    """A socket on a machine that lacks a family of addresses."""

    absent = socket.AF_INET6

    def __init__(self, family: int = socket.AF_INET, *arguments: int, **options: int) -> None:
        if family == self.absent:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *arguments, **options)


class OnlyIpv6(OneFamily):
    absent = socket.AF_INET


@pytest.mark.parametrize("text", ["[::]:0", "localhost:0"])
def test_a_machine_without_ipv6_listens_by_ipv4(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", OneFamily)
    assert address.loopback() == "127.0.0.1"
    with listening(text) as (listeners, port):
        assert [it.family for it in listeners] == [socket.AF_INET]
        assert peer_at(listeners, "127.0.0.1", port).host == "127.0.0.1"


def test_a_machine_without_ipv4_listens_by_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", OnlyIpv6)
    assert address.loopback() == "::1"
    assert address.own_ip("localhost") == "::1"
    assert str(address.reachable(parse("0.0.0.0:7"))) == "[::1]:7"
    with listening("localhost:0") as (listeners, port):
        assert peer_at(listeners, "::1", port).host == "::1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "a-name"])
def test_the_address_that_others_connect_to_is_one_ip_address(host: str) -> None:
    assert address.own_ip("fd00::7") == "fd00::7"
    with pytest.raises(ValueError, match=r"no address at which|no IP address"):
        address.own_ip(host)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:10.0.0.7:80", "10.0.0.7:80"),
        ("ipv6:%5Bfd00::7%5D:80", "[fd00::7]:80"),
        ("ipv6:[fe80::7%25eth0]:80", "[fe80::7]:80"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:80", "10.0.0.7:80"),
        ("unix:", "None"),
    ],
)
def test_a_client_has_one_address_however_it_is_named(peer: str, expected: str) -> None:
    assert str(address.of_grpc_peer(peer)) == expected
