"""Stop strings are found wherever tokens cut them, and nothing else is held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.stop_strings import StopStrings

words = st.text("ab", min_size=1, max_size=5)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The slow obvious version: look at every end, take the longest that is there."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - len(max(met, key=len))], True
    return text, False


@given(st.lists(st.text("abc", max_size=4)), st.lists(words, max_size=4))
def test_output_is_cut_before_the_first_stop_however_it_is_pieced(
    pieces: list[str], stops: list[str]
) -> None:
    strings = StopStrings(stops)
    output = ""
    for piece in pieces:
        output += strings.feed(piece)
        if strings.is_met:
            break
    output += strings.flush()
    assert (output, strings.is_met) == cut("".join(pieces), stops)


@given(st.text("abc", max_size=12), st.lists(words, max_size=4))
def test_only_the_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    delivered = strings.feed(text)
    held = text[len(delivered) :]
    if not strings.is_met and held:
        assert any(stop.startswith(held) for stop in stops)


def test_stop_across_pieces_is_found() -> None:
    strings = StopStrings(["STOP"])
    assert [strings.feed(piece) for piece in ("one S", "TO", "P two")] == ["one ", "", ""]
    assert strings.is_met
    assert strings.flush() == ""


def test_beginning_of_a_stop_is_delivered_when_it_does_not_go_on() -> None:
    strings = StopStrings(["STOP"])
    assert [strings.feed("ST"), strings.feed("ART")] == ["", "START"]


def test_beginning_of_a_stop_at_the_end_is_flushed() -> None:
    strings = StopStrings(["STOP"])
    assert strings.feed("a STO") == "a "
    assert strings.flush() == "STO"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["ab.", ".cd"], ("ab.", True)),
        (["ab.", "cd"], ("ab.cd", False)),
        (["a.b", ".c"], ("a.b", True)),
    ],
    ids=["second-dot", "only-early-dot", "dot-after"],
)
def test_stop_before_the_output_may_end_is_text(
    pieces: list[str], expected: tuple[str, bool]
) -> None:
    strings = StopStrings(["."])
    early = strings.feed(pieces[0], may_end=False)
    output = early + strings.feed(pieces[1]) + strings.flush()
    assert (output, strings.is_met) == expected


def test_stop_that_began_before_the_output_may_end_counts() -> None:
    strings = StopStrings(["END"])
    assert strings.feed("x EN", may_end=False) == "x "
    assert strings.feed("D") == ""
    assert strings.is_met
