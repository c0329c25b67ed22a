"""Calls without a connection: what is asked of whom next, and when a call gives up."""

import json

import pytest
from orcinus_client import ConnectionLost, InvalidRequest, Retry
from orcinus_client.calls import Frontends, Query, StreamedCall

FRONTENDS = Frontends(["http://a/v1", "http://b/v1"], Retry(max_failures=3))
QUERY = Query.completion("x", {"n": 1})


def event(number: int) -> bytes:
    """An event with one token."""
    chunk = {"seed": 7, "choices": [{"index": 0, "token_ids": [number]}]}
    return f"id: {number}\ndata: {json.dumps(chunk)}\n\n".encode()


def test_a_stream_that_breaks_goes_on_at_the_next_frontend() -> None:
    call = StreamedCall(FRONTENDS, QUERY, resume=True)
    url, body, _ = call.begin()
    assert url == "http://a/v1/completions"
    assert "resumption" not in body
    assert len(list(call.take(event(5)))) == 1
    with pytest.raises(ConnectionLost):
        call.end()
    assert call.fail(ConnectionLost()) == 0
    url, body, headers = call.begin()
    assert url == "http://b/v1/completions"
    assert body["resumption"] == {"seed": 7, "token_ids": [[5]]}
    assert headers["Last-Event-ID"] == "5"


def test_a_stream_that_must_not_resume_ends_once_it_has_begun() -> None:
    call = StreamedCall(FRONTENDS, QUERY, resume=False)
    call.begin()
    assert call.fail(ConnectionLost()) == 0
    call.begin()
    list(call.take(event(5)))
    with pytest.raises(ConnectionLost):
        call.fail(ConnectionLost())


def test_what_comes_ends_a_row_of_failures() -> None:
    call = StreamedCall(FRONTENDS, QUERY, resume=True)
    for _ in range(2):
        call.fail(ConnectionLost())
    call.begin()
    list(call.take(event(5)))
    for _ in range(2):
        call.fail(ConnectionLost())
    with pytest.raises(ConnectionLost):
        call.fail(ConnectionLost())


def test_a_refusal_is_not_tried_again() -> None:
    with pytest.raises(InvalidRequest):
        StreamedCall(FRONTENDS, QUERY, resume=True).fail(InvalidRequest("no"))
