"""Ids of events say how far a client has got, and are read back as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import errors
from services.frontend.http.openai.event_id import AnswerPosition, EventIds, StreamPosition

REQUEST_ID = "6921f3aa" + "0" * 24

positions = st.one_of(
    st.just(AnswerPosition()),
    st.builds(
        AnswerPosition, st.just(True), st.integers(min_value=0, max_value=10**9), st.booleans()
    ),
)


@given(st.lists(positions, min_size=1, max_size=5))
def test_position_is_read_as_it_was_written(answers: list[AnswerPosition]) -> None:
    ids = EventIds(REQUEST_ID, answers)
    written = StreamPosition(REQUEST_ID, tuple(answers))
    assert StreamPosition.parse(ids.current().decode()) == written
    if all(answer.is_finished for answer in answers):
        assert StreamPosition.parse(ids.usage().decode()).has_usage


def test_ids_follow_the_events() -> None:
    ids = EventIds(REQUEST_ID, [AnswerPosition(), AnswerPosition(True, 3)])
    assert (ids.has_begun(0), ids.has_begun(1)) == (False, True)
    ids.advance(0, 0, is_finished=False)
    assert ids.current().decode() == f"{REQUEST_ID}:0,3"
    ids.advance(1, 2, is_finished=True)
    ids.advance(0, 1, is_finished=False)
    assert ids.current().decode() == f"{REQUEST_ID}:1,5f"


@pytest.mark.parametrize(
    "text",
    [
        "",
        REQUEST_ID,
        f"{REQUEST_ID}:",
        f"{REQUEST_ID}:1,",
        f"{REQUEST_ID}:f",
        f"{REQUEST_ID}:-1",
        f"{REQUEST_ID}:-f",
        f"{REQUEST_ID}:1;usage",
        f"{REQUEST_ID}:1f;usage;usage",
        f"{REQUEST_ID}:1\n",
        f"{REQUEST_ID}:{'9' * 5000}",
        f"{REQUEST_ID.upper()}:1",
        f"{REQUEST_ID}0:1",
        f"{REQUEST_ID}:\u0661",
    ],
    ids=lambda text: text[28:44],
)
def test_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        StreamPosition.parse(text)
    assert caught.value.field == "Last-Event-ID"
