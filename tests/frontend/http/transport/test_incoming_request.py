"""How much of a request has come, counted without a connection."""

from http import HTTPStatus

import pytest

from services.frontend.http.transport.connection_limits import ConnectionLimits
from services.frontend.http.transport.connection_refusal import Refused
from services.frontend.http.transport.incoming_request import MAX_FRAMING_BYTES, IncomingRequest

LIMITS = ConnectionLimits(max_head_bytes=100, max_headers=2)


def in_body() -> IncomingRequest:
    """A request whose head has come."""
    incoming = IncomingRequest(LIMITS)
    incoming.begin()
    incoming.begin_body()
    return incoming


def test_a_request_has_begun_until_all_of_it_has_come() -> None:
    incoming = IncomingRequest(LIMITS)
    assert not incoming.has_begun
    incoming.begin()
    assert incoming.has_begun
    assert not incoming.is_in_body
    incoming.begin_body()
    assert incoming.has_begun
    assert incoming.is_in_body
    incoming.end()
    assert not incoming.has_begun
    assert not incoming.is_in_body


def test_pieces_of_a_head_count_though_the_parser_tells_nothing_of_them() -> None:
    incoming = IncomingRequest(LIMITS)
    incoming.begin()
    incoming.add_piece(99, since=incoming.mark())
    with pytest.raises(Refused, match="100 bytes"):
        incoming.add_piece(1, since=incoming.mark())


def test_a_piece_in_which_the_head_ends_counts_for_neither_part() -> None:
    incoming = IncomingRequest(LIMITS)
    incoming.begin()
    mark = incoming.mark()
    incoming.begin_body()
    incoming.add_piece(2 * MAX_FRAMING_BYTES, since=mark)


def test_the_body_may_be_as_long_as_its_reader_lets_it() -> None:
    incoming = in_body()
    for _ in range(3):
        mark = incoming.mark()
        incoming.add_body(MAX_FRAMING_BYTES)
        incoming.add_piece(MAX_FRAMING_BYTES + 9, since=mark)


def test_framing_must_not_follow_framing_for_long() -> None:
    incoming = in_body()
    incoming.add_piece(MAX_FRAMING_BYTES, since=incoming.mark())
    with pytest.raises(Refused) as refused:
        incoming.add_piece(1, since=incoming.mark())
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize(
    ("version", "n_hosts", "is_right"),
    [("1.1", 1, True), ("1.1", 0, False), ("1.1", 2, False), ("1.0", 0, True), ("2.0", 1, False)],
)
def test_a_head_names_one_host(version: str, n_hosts: int, is_right: bool) -> None:
    incoming = IncomingRequest(LIMITS)
    incoming.begin()
    for number in range(n_hosts):
        incoming.add_header(b"Host", b"x", n_headers=number + 1)
    if is_right:
        incoming.check_head(version)
    else:
        with pytest.raises(Refused):
            incoming.check_head(version)
