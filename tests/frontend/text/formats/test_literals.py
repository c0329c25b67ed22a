"""Values in other notations than JSON, and texts that get the types of a schema."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.literals import MAX_DEPTH, literal_as_json
from services.frontend.text.formats.parameters import text_as_json, types_of
from services.frontend.text.formats.pythonic import Pythonic
from tests.frontend.text.formats.said import read

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_python_and_json_are_read_as_they_were_meant(value: Any) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
        found = literal_as_json(text)
        assert found is not None
        assert json.loads(found) == value


@given(st.text(st.sampled_from("'\"\\nrtxu0a1\n"), max_size=12))
def test_strings_are_read_as_python_reads_them(text: str) -> None:
    for quote in ("'", '"', "'''", '"""'):
        written = f"{quote}{text}{quote}"
        try:
            value = ast.literal_eval(written)
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, str) and "\r" not in written:
            found = literal_as_json(written)
            if found is not None:  # Python joins strings that follow one another
                assert json.loads(found) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "[1", "{1, 2}", "{a}", "1 2", "'a", '"a\\', "[1,,2]", "f(1)", "a: 1", "nan", "inf"],
)
def test_other_texts_are_no_values(text: str) -> None:
    assert literal_as_json(text) is None


def test_depth_is_limited() -> None:
    assert literal_as_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert literal_as_json("[" * 100_000) is None


PLACE = {"$defs": {"Place": {"type": ["object", "null"]}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, ' "a" ', ' "a" '),
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "integer"}, "7.0", 7.0),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "boolean"}, "FALSE", "FALSE"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "True", True),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1, 'a']", [1, "a"]),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1", "[1"),
        ({"$ref": "#/$defs/Place"}, "{'x': None}", {"x": None}),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"$ref": "other.json"}, "a b", "a b"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "4", 4),
        ({}, "[1]", [1]),
        ({}, '"a"', '"a"'),
        (True, "a", "a"),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
    ],
    ids=str,
)
def test_texts_get_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    assert json.loads(text_as_json(text, types_of(schema, PLACE))) == value


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ("[find(,x)]", {"a": None}, ",x)]"),
        ("[find(a=,b=2)]", {"a": None}, ",b=2)]"),
        ("[find(a={'k': =})]", {"a": {"k": None}}, "=})]"),
        ("[find(a={'k' =1})]", {"a": {"k": None}}, "=1})]"),
        ("[find(a={'k': 1, =})]", {"a": {"k": 1}}, "=})]"),
        ("[find(a=[1, =])]", {"a": [1]}, "=])]"),
        ("[find(a=1), other] x", {"a": 1}, ", other] x"),
        ("[find(a=1), ]", {"a": 1}, ""),
    ],
)
def test_calls_that_break_off_have_arguments_in_json_and_the_rest_is_content(
    text: str, arguments: object, content: str
) -> None:
    schema = '{"type": "object", "properties": {"a": {}, "b": {}}}'
    rules = CallRules(new_id="id-{}".format, tools={"find": schema})
    for pieces in ((text,), tuple(text)):
        said = read(lambda: Pythonic().reader(rules), *pieces)
        assert [(name, json.loads(written)) for name, written in said.calls] == [
            ("find", arguments)
        ]
        assert said.content == content
