"""Finished values are checked against schemas within limits, in a process of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.frontend.text import grammar_checker as checker
from services.frontend.text import value_checker
from services.frontend.text.value_checker import CannotCheck


@pytest.mark.parametrize(
    ("schema", "value", "is_valid"),
    [
        ({"uniqueItems": True}, "[1, 2]", True),
        ({"uniqueItems": True}, "[1, 1.0]", False),
        ({"not": {"const": "x"}}, '"x"', False),
        ({"pattern": "^(?!a)"}, '"b"', True),
        ({"pattern": "^(?!a)"}, '"a"', False),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"a"', False),
        ({"format": "ipv4"}, '"x"', True),
        ({"type": "object"}, '{"a": 1', False),
        ({"type": "number"}, "NaN", False),
        ({"items": [{"type": "integer"}]}, '["a"]', False),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [True]}, "[1]", True),
    ],
    ids=str,
)
def test_a_value_matches_its_schema_or_does_not(schema: Any, value: str, is_valid: bool) -> None:
    assert value_checker.is_valid(json.dumps(schema), value) is is_valid
    assert checker.is_valid(json.dumps(schema), value) is is_valid


@pytest.mark.parametrize(
    "schema",
    [{"type": "objekt"}, {"$ref": "http://127.0.0.1:1/x"}, {"pattern": "("}, {"$schema": "x:y"}],
    ids=str,
)
def test_a_schema_that_cannot_be_used_has_no_verdict(schema: Any) -> None:
    with pytest.raises(CannotCheck):
        value_checker.is_valid(json.dumps(schema), "1")
    assert checker.is_valid(json.dumps(schema), "1") is None


def test_no_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"type": "string"}')
    schema = json.dumps({"$ref": f"file://{tmp_path}/other.json"})
    assert checker.is_valid(schema, "1") is None


def test_work_without_end_has_no_verdict() -> None:
    backtracking = json.dumps({"pattern": r"^(?=((a+)+)+$)(a+)+\2$", "not": {}})
    assert checker.is_valid(backtracking, json.dumps("a" * 5000 + "b")) in (None, False)
    nested: dict[str, Any] = {"allOf": [{"$ref": "#/$defs/0"}] * 2, "$defs": {}}
    for level in range(40):
        nested["$defs"][str(level)] = {"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2}
    nested["$defs"]["40"] = {"type": "array"}
    assert checker.is_valid(json.dumps(nested), "[]") is None


def test_a_value_that_is_nested_without_end_has_no_verdict_or_is_invalid() -> None:
    assert checker.is_valid("{}", "[" * 200_000 + "]" * 200_000) in (None, False)
