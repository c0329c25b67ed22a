"""Calls of an HTTP API succeed, or say in words why not."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.http_api import ApiError, HttpApi
from tests.cli.fake_api import HOLD, FakeApi, delta

LIMIT_S = 30.0


@pytest.mark.parametrize("url", ["", "x", "ftp://x", "http://", "127.0.0.1:8000"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no URL like http://127\.0\.0\.1:8000"):
        HttpApi(url)


def test_events_come_one_by_one_and_end() -> None:
    with FakeApi(lambda body: [delta("a"), delta("b")]).serving() as api:
        with HttpApi(api.url + "/").events("/v1/chat/completions", {}) as events:
            assert list(events) == [delta("a"), delta("b")]
        assert HttpApi(api.url).get("/v1/models") == {"data": [{"id": "fake"}]}


def test_a_refusal_is_in_the_servers_words() -> None:
    with (
        FakeApi(lambda body: (403, "not you")).serving() as api,
        pytest.raises(ApiError, match=r"^not you$") as raised,
        HttpApi(api.url).events("/", {}),
    ):
        pass
    assert raised.value.status == 403


def test_the_end_of_a_call_closes_its_connection() -> None:
    def answer() -> bytes:
        """Answers with an event, and returns what the client sends until it closes."""
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            connection.recv(2**16)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\ndata: {}\n\n")
            return connection.recv(2**16)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as thread,
    ):
        rest = thread.submit(answer)
        with HttpApi(f"http://127.0.0.1:{listener.getsockname()[1]}").events("/") as events:
            assert next(events) == {}
        assert rest.result(LIMIT_S) == b""


def test_silence_has_an_end() -> None:
    with (
        FakeApi(lambda body: [delta("a"), HOLD]).serving() as api,
        HttpApi(api.url, timeout_s=0.2).events("/", {}) as events,
    ):
        assert next(events) == delta("a")
        with pytest.raises(ApiError, match=r"has not answered for 0\.2 s"):
            next(events)


def test_nobody_there_is_told() -> None:
    with pytest.raises(ApiError, match="cannot be reached") as raised:
        HttpApi("http://127.0.0.1:1").get("/")
    assert raised.value.status == 0
