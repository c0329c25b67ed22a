"""The checker finds every way in which a stream can be wrong, and nothing in one that is right."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.faults.checker import End, Event, Expected, Failure, StreamId, Tokens, check

STREAM = StreamId("a", 0)
MAX_PAUSE_S = 10.0


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Event], Expected]:
    """A stream that is right: its log, and the oracle."""
    pieces = draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1))
    events: list[Event] = []
    start, time_s = 0, 0.0
    for piece in pieces:
        time_s += draw(st.floats(0.0, MAX_PAUSE_S - 0.1))
        text = " ".join(map(str, piece))
        events.append(Tokens(STREAM, start, tuple(piece), text, time_s))
        start += len(piece)
    token_ids = tuple(token for piece in pieces for token in piece)
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    return [*events, End(STREAM, "length", time_s)], Expected(token_ids, text, "length")


def kinds(events: list[Event], expected: Expected) -> set[str]:
    return {item.kind for item in check(events, {STREAM: expected}, max_pause_s=MAX_PAUSE_S)}


def piece_at(data: st.DataObject, events: list[Event]) -> tuple[int, Tokens]:
    """The index of any piece, and the piece."""
    index = data.draw(st.integers(0, len(events) - 2))
    piece = events[index]
    assert isinstance(piece, Tokens)
    return index, piece


@given(streams())
def test_a_stream_that_is_right_is_left_alone(stream: tuple[list[Event], Expected]) -> None:
    assert kinds(*stream) == set()


@given(streams(), st.data())
def test_a_piece_that_is_missing_is_a_gap(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    index, _ = piece_at(data, events)
    assert "gap" in kinds(events[:index] + events[index + 1 :], expected)


@given(streams(), st.data())
def test_a_piece_that_comes_again_is_a_duplicate(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    index, piece = piece_at(data, events)
    later = data.draw(st.integers(index + 1, len(events) - 1))
    assert "duplicate" in kinds([*events[:later], piece, *events[later:]], expected)


@given(streams(), st.data())
def test_a_token_that_is_another_is_a_change(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    index, piece = piece_at(data, events)
    place = data.draw(st.integers(0, len(piece.token_ids) - 1))
    tokens = list(piece.token_ids)
    tokens[place] += 1
    events[index] = replace(piece, token_ids=tuple(tokens))
    assert kinds(events, expected) == {"changed"}


@given(streams(), st.data())
def test_a_text_that_is_another_is_a_change(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    index, piece = piece_at(data, events)
    events[index] = replace(piece, text=piece.text + "!")
    assert kinds(events, expected) == {"changed"}


@given(streams())
def test_another_reason_to_end_is_a_change(stream: tuple[list[Event], Expected]) -> None:
    events, expected = stream
    assert kinds([*events[:-1], End(STREAM, "stop", events[-1].time_s)], expected) == {"changed"}


@given(streams())
def test_tokens_past_the_oracle_are_a_change(stream: tuple[list[Event], Expected]) -> None:
    events, expected = stream
    more = Tokens(STREAM, len(expected.token_ids), (1,), "", events[-1].time_s)
    assert kinds([*events[:-1], more, events[-1]], expected) == {"changed"}


@given(streams(), st.data())
def test_a_stream_without_an_end_is_lost(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    n_events = data.draw(st.integers(0, len(events) - 1))
    assert kinds(events[:n_events], expected) == {"lost"}


@given(streams(), st.data())
def test_a_stream_that_fails_is_lost(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    n_events = data.draw(st.integers(0, len(events) - 1))
    failure = Failure(STREAM, "unavailable", events[n_events].time_s)
    assert kinds([*events[:n_events], failure], expected) == {"lost"}


@given(streams())
def test_a_second_end_is_found(stream: tuple[list[Event], Expected]) -> None:
    events, expected = stream
    assert kinds([*events, events[-1]], expected) == {"ended twice"}


@given(streams())
def test_a_token_after_the_end_is_found(stream: tuple[list[Event], Expected]) -> None:
    events, expected = stream
    n_tokens = len(expected.token_ids)
    late = Tokens(STREAM, n_tokens, (), "", events[-1].time_s)
    assert kinds([*events, late], expected) == {"after the end"}


@given(streams(), st.data())
def test_a_stream_that_stands_still_is_found(
    stream: tuple[list[Event], Expected], data: st.DataObject
) -> None:
    events, expected = stream
    index = data.draw(st.integers(1, len(events) - 1))
    late = [replace(event, time_s=event.time_s + MAX_PAUSE_S + 1) for event in events[index:]]
    assert kinds([*events[:index], *late], expected) == {"stalled"}


def test_a_stream_of_nobody_is_found() -> None:
    assert [item.kind for item in check([End(STREAM, "stop", 0.0)], {}, max_pause_s=1)] == [
        "changed"
    ]
