"""Text that is nearly JSON stands for the object that was meant, or for none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text import near_json

READ = {
    "newline": ('{"a": "one\ntwo\tthree"}', {"a": "one\ntwo\tthree"}),
    "backslash": (r'{"a": "\d+\.\w"}', {"a": r"\d+\.\w"}),
    "python": ("{'a': None, 'b': True, 'c': False}", {"a": None, "b": True, "c": False}),
    "apostrophe": ("{'a': 'it's {', 'b': 1}", {"a": "it's {", "b": 1}),
    "comma": ('{"a": [1, 2,], }', {"a": [1, 2]}),
    "comment": ('{"a": 1, // "b\n /* } */ "c": 2 # d\n}', {"a": 1, "c": 2}),
    "names": ("{a: 1, b-c: .5}", {"a": 1, "b-c": 0.5}),
    "extra-brace": ('{"a": {}}}\n', {"a": {}}),
    "halves": (r'{"a": "\ud83d\ude00\ud83d", }', {"a": "😀\ufffd"}),
    "joined-line": ('{"a": "b\\\nc"}', {"a": "bc"}),
    "empty": ("", {}),
}


@pytest.mark.parametrize(("text", "value"), READ.values(), ids=READ.keys())
def test_object_that_was_meant_is_read(text: str, value: object) -> None:
    assert near_json.object_of(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "1",
        "{",
        '{"a": ',
        '{"a" 1}',
        '{"a": b}',
        "{'a': 'b",
        "{[}",
        "x",
        "{" * 9999,
        '{"a": 1e999}',
        "{'a': [-1e999]}",
        '{"a": Infinity}',
    ],
)
def test_other_text_is_no_object(text: str) -> None:
    assert near_json.object_of(text) is None


def test_object_that_is_cut_has_its_complete_members() -> None:
    text = '{"a": 1, "b": ["one\ntwo", {"c": true}], "d": "x'
    cuts = [near_json.object_of(text[:end], is_cut=True) for end in range(1, len(text) + 1)]
    assert cuts[-1] == {"a": 1, "b": ["one\ntwo", {"c": True}]}
    assert {"a": 1, "b": ["one\ntwo", {}]} in cuts
    assert all(isinstance(cut, dict) for cut in cuts)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES))
def test_json_with_a_comma_too_many_is_read_as_json(value: dict[str, object]) -> None:
    text = json.dumps(value)
    assert near_json.object_of(text) == value
    if value:
        assert near_json.object_of(text[:-1] + ",}") == value


@given(st.text(st.sampled_from("{}[]\"'\\,:/*#\n abnu019.-")))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for is_cut in (False, True):
        value = near_json.object_of(text, is_cut=is_cut)
        assert value is None or isinstance(value, dict)
