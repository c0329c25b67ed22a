"""Events out of bytes, and what a stream keeps to go on."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus_client import ConnectionLost, RequestFailed, Unavailable, UnexpectedAnswer
from orcinus_client.stream import EventReader, Stream

TEXT = (
    'id: r:1\ndata: {"text": "a\u2028b\x85c"}\n\n: waiting\n\nid: r:2\r\ndata: 1\r\ndata: 2\r\n\r\n'
)
EVENTS = [("r:1", '{"text": "a\u2028b\x85c"}'), ("r:2", "1\n2")]


@given(st.lists(st.integers(0, len(TEXT.encode())), max_size=6))
def test_events_are_the_same_however_their_bytes_come(cuts: list[int]) -> None:
    data, reader = TEXT.encode(), EventReader()
    places = [0, *sorted(cuts), len(data)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(places)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def event(event_id: str, **chunk: Any) -> bytes:
    return f"id: {event_id}\ndata: {json.dumps(chunk)}\n\n".encode()


def test_what_has_come_is_given_back_after_a_break() -> None:
    stream = Stream({"prompt": "x"}, resume=True)
    body, headers = stream.begin()
    assert (body, headers) == ({"prompt": "x", "stream": True, "return_token_ids": True}, {})
    first = event("r:1,-", seed=7, choices=[{"index": 0, "token_ids": [3]}])
    second = event("r:1,2", choices=[{"index": 1, "token_ids": [4, 5]}])
    assert len(list(stream.take(first + second + b"id: r:2,2\ndata: {"))) == 2
    with pytest.raises(ConnectionLost):
        stream.end()
    resumed, headers = stream.begin()
    assert resumed == {**body, "resumption": {"seed": 7, "token_ids": [[3], [4, 5]]}}
    assert headers == {"Last-Event-ID": "r:1,2"}


def test_a_stream_that_does_not_resume_goes_on_only_before_its_first_chunk() -> None:
    stream = Stream({}, resume=False)
    assert stream.begin() == ({"stream": True}, {})
    assert stream.can_go_on
    assert list(stream.take(b'data: {"choices": []}\n\n'))
    assert not stream.can_go_on


def test_a_stream_whose_ids_are_taken_out_goes_on_only_before_its_first_chunk() -> None:
    stream = Stream({}, resume=True)
    stream.begin()
    assert stream.can_go_on
    chunk = {"seed": 7, "choices": [{"index": 0, "token_ids": [3]}]}
    assert list(stream.take(f"data: {json.dumps(chunk)}\n\n".encode()))
    assert not stream.can_go_on
    assert stream.lacks_ids


@pytest.mark.parametrize(
    "line",
    [b"data: <html>", b"data: [1]", b'data: {"choices": [{}]}', b"data: {}", b"data: \xff"],
)
def test_what_is_no_chunk_is_an_error_of_the_client(line: bytes) -> None:
    stream = Stream({}, resume=True)
    stream.begin()
    with pytest.raises(UnexpectedAnswer):
        list(stream.take(b"id: r:1\n" + line + b"\n\n"))


def test_an_error_that_is_a_text_is_an_error_of_the_client() -> None:
    stream = Stream({}, resume=True)
    with pytest.raises(RequestFailed, match="why"):
        list(stream.take(b'data: {"error": "why"}\n\n'))


def test_nothing_behind_the_end_is_read() -> None:
    stream = Stream({}, resume=True)
    assert list(stream.take(b"data: [DONE]\n\ndata: x\n\n")) == []
    stream.end()


@pytest.mark.parametrize(
    ("code", "kind"), [("unavailable", Unavailable), ("request_failed", RequestFailed)]
)
def test_an_error_comes_after_the_chunks_before_it(code: str, kind: type[Exception]) -> None:
    stream = Stream({}, resume=False)
    error = {"error": {"message": "why", "code": code}}
    taken = stream.take(b'data: {"choices": []}\n\n' + f"data: {json.dumps(error)}\n\n".encode())
    assert next(taken) == {"choices": []}
    with pytest.raises(kind, match="why"):
        next(taken)
