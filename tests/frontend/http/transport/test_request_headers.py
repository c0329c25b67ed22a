"""The headers of a request, beside Starlette's."""

from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from services.frontend.http.transport.request_headers import headers_of

NAMES = st.sampled_from((b"authorization", b"content-type", b"x-api-key"))
VALUES = st.binary(max_size=3)  # of any bytes, which Latin-1 has letters for


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6))
def test_each_name_has_the_value_that_starlette_finds(headers: list[tuple[bytes, bytes]]) -> None:
    request = Request({"type": "http", "headers": headers})
    expected = {name: request.headers[name] for name in request.headers}
    assert headers_of(request) == expected
    assert headers_of(request) == expected  # once they have been read
