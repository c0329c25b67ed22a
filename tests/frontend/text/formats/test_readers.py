"""Readers of all formats: what answers say, wherever an answer is cut into pieces or ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.formats.registry import TOOL_FORMATS
from tests.frontend.text.formats.cases import CANONICAL, CASES, Case
from tests.frontend.text.formats.reading import Said, read, rules


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{one.parser}" for at, one in enumerate(CASES)])
def test_answer_is_read_whole_and_in_pieces(case: Case) -> None:
    said = read(case.parser, [case.text])
    assert (said.content, [tuple(call) for call in said.calls]) == (case.content, list(case.calls))
    if case.ids:
        assert tuple(said.ids) == case.ids
    assert read(case.parser, case.text) == said
    for cut in range(1, len(case.text), 3):
        assert read(case.parser, [case.text[:cut], case.text[cut:]]) == said


@pytest.mark.parametrize("must_call", [False, True], ids=["may", "must"])
@pytest.mark.parametrize("parser", CANONICAL)
def test_answer_that_ends_inside_a_call_says_no_more_than_the_call(
    parser: str, must_call: bool
) -> None:
    _, text, _ = CANONICAL[parser]
    whole = read(parser, [text]).calls
    for end in range(1, len(text)):
        said = read(parser, [text[:end]], must_call=must_call)
        names = [name for name, _ in said.calls]
        assert names == ["find", "dive"][: len(names)]
        for (_, part), (_, arguments) in zip(said.calls, whole, strict=False):
            assert arguments.startswith(part)
        is_content = not said.calls and not must_call
        assert said.content == (text[:end] if is_content else ""), end


@pytest.mark.parametrize("parser", CANONICAL)
def test_call_that_is_cut_is_told_from_a_whole_one(parser: str) -> None:
    one, _, _ = CANONICAL[parser]
    for end in range(len(one) + 1):
        reader = TOOL_FORMATS[parser].reader(rules())
        said = Said()
        said.add(reader.feed(one[:end]))
        said.add(reader.flush())
        is_whole = bool(said.calls) and json_of(said.calls[0][1]) == {"what": "a", "n": 3}
        assert reader.ends_in_call is (bool(said.calls) and not is_whole)


def json_of(text: str) -> object:
    """Returns the value of a JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize("parser", CANONICAL)
def test_only_the_first_call_is_kept_if_one_is_wanted(parser: str) -> None:
    _, text, _ = CANONICAL[parser]
    said = read(parser, [text], is_single=True)
    assert [name for name, _ in said.calls] == ["find"]
    assert said.content == ""


@pytest.mark.parametrize("parser", CANONICAL)
def test_calls_inside_an_answer_of_another_format_are_its_text(parser: str) -> None:
    one, _, _ = CANONICAL[parser]
    text = json.dumps({"a": one}, ensure_ascii=False)
    assert read(parser, text, is_exclusive=True).content == text
    said = read(parser, one, is_exclusive=True)
    assert ([name for name, _ in said.calls], said.content) == (["find"], "")


DROPS_MARKS = ("harmony", "command_r7b", "gigachat3", "functionary_v32")
"""Formats with marks around content, which are not content."""

PIECES = sorted(
    {
        piece
        for texts in CANONICAL.values()
        for text in texts[:2]
        for piece in (text[: len(text) // 2], text[len(text) // 2 :], text[:30], text[-30:])
    }
    | {mark for one in TOOL_FORMATS.values() for mark in one.markers}
    | set("{}[]()<>|/:,='\"\\ \nax1")
    | {"find", "dive", "True", "None", "find(", '"name": "find"', "call:", "functions.find:0"}
)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12), data=st.data())
def test_how_an_answer_is_cut_changes_nothing(
    parser: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said = read(parser, [text])
    assert read(parser, pieces) == said == read(parser, text)
    if not said.calls and parser not in DROPS_MARKS:
        assert said.content == text
