"""Which base URL is asked next, and when; time is passed in, and luck is the least there is."""

import pytest
from orcinus_client import GatewayTimedOut, InvalidRequest, Overloaded, Retry, Unavailable
from orcinus_client.attempts import Attempts
from orcinus_client.errors import ClientError, ConnectionLost

URLS = ["http://a", "http://b"]


def attempts(urls: list[str] = URLS, **limits: float) -> Attempts[str]:
    return Attempts(urls, Retry(**limits), clock=lambda: 100.0, draw=lambda least, _: least)  # type: ignore[arg-type]


def failed(it: Attempts[str], *errors: ClientError) -> list[tuple[str, float]]:
    """The base URL after each failure, and the pause before it."""
    return [(pause, it.frontend)[::-1] for pause in map(it.fail, errors)]


def test_each_is_asked_at_once_and_then_after_longer_and_longer_pauses() -> None:
    found = failed(attempts(), *(ConnectionLost() for _ in range(5)))
    assert found == [
        ("http://b", 0.0),
        ("http://a", 0.05),
        ("http://b", 0.1),
        ("http://a", 0.2),
        ("http://b", 0.4),
    ]


def test_pauses_stay_below_their_limit() -> None:
    it = attempts(["http://a"], max_pause_s=1.0)
    assert [it.fail(ConnectionLost()) for _ in range(9)][-1] == 0.5


def test_a_server_is_not_asked_before_it_wants_to_be() -> None:
    it = attempts()
    found = failed(it, Overloaded("", retry_after_s=7.0), Unavailable(""), ConnectionLost())
    assert found == [("http://b", 0.0), ("http://a", 7.0), ("http://b", 0.1)]


def test_nobody_waits_for_an_hour() -> None:
    error = Overloaded("", retry_after_s=3600.0)
    with pytest.raises(Overloaded) as raised:
        attempts(["http://a"]).fail(error)
    assert raised.value is error


def test_what_must_not_be_tried_again_is_raised_at_once() -> None:
    with pytest.raises(InvalidRequest):
        attempts().fail(InvalidRequest("no"))


def test_what_a_proxy_did_not_wait_for_is_not_computed_twice() -> None:
    computed = Attempts(URLS, Retry(), is_computed=True)
    assert computed.fail(Unavailable("")) == 0.0
    with pytest.raises(GatewayTimedOut):
        computed.fail(GatewayTimedOut(""))
    assert attempts().fail(GatewayTimedOut("")) == 0.0


def test_attempts_in_a_row_are_counted() -> None:
    it = attempts(max_failures=2)
    it.fail(ConnectionLost())
    it.note_success()
    it.fail(ConnectionLost())
    with pytest.raises(ConnectionLost) as raised:
        it.fail(ConnectionLost())
    assert raised.value.__notes__ == ["gave up after 2 attempts"]
