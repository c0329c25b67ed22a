"""Names and deadlines that clients give their calls."""

import pytest

from services.common import errors
from services.frontend.request.client_call import ClientCall, begin_call, current_call, current_id
from services.frontend.request.request_id import is_request_id
from tests.simulated_time import simulate


def begun(client_id: str | None) -> ClientCall:
    async def main() -> ClientCall:
        assert current_call() is None
        call = begin_call(client_id)
        assert current_call() is call
        assert current_id() == call.shown_id
        return call

    return simulate(main())


@pytest.mark.parametrize("name", ["a", "a" * 128, "req_0-9.A:B/c+d=@e", "7f" * 16])
def test_client_s_name_is_kept_beside_ours(name: str) -> None:
    call = begun(name)
    assert call.shown_id == call.client_id == name
    assert is_request_id(call.request_id)


@pytest.mark.parametrize(
    "name", [None, "", "a b", "a" * 129, "a\n", 'a"', "é", "a;b", "\x1b[31m", "a,b"]
)
def test_other_names_are_replaced_by_ours(name: str | None) -> None:
    call = begun(name)
    assert call.client_id is None
    assert call.shown_id == call.request_id


@pytest.mark.parametrize(
    ("text", "deadline"), [("1", 6.0), ("0.25", 5.25), ("86400", 86405.0), (None, None)]
)
def test_time_counts_from_the_beginning(text: str | None, deadline: float | None) -> None:
    call = ClientCall(request_id="x", timeout=text, began_at=5.0)
    assert call.deadline() == deadline


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "-1", "1e3", "nan", "inf", "5s", " 5", "86401", "9" * 400, "٣", "1_0"]
)
def test_other_times_are_refused_by_name(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="number of seconds") as caught:
        ClientCall(request_id="x", timeout=text).deadline()
    assert caught.value.field == "x-request-timeout"
