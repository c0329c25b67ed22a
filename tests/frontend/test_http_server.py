"""Listening: free ports, IPv6, and addresses that cannot be had."""

import pytest

from services.frontend.http_server import address_of, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_free_port_is_found(host: str) -> None:
    with listen(f"{host}:0") as listener:
        port = listener.getsockname()[1]
        assert port != 0
        assert address_of(listener, f"{host}:0") == f"{host}:{port}"


def test_taken_address_is_an_error_that_names_it() -> None:
    with listen("127.0.0.1:0") as listener:
        address = address_of(listener, "127.0.0.1:0")
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            listen(address)


def test_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.1:0"):
        listen("203.0.113.1:0")
