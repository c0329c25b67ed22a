"""A client's schema is enforced as far as the engine can, and the rest is named."""

import json
from datetime import datetime
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.frontend.request.json_schema.client_schema import AdditionalProperties, ClientSchema
from tests.frontend.request.json_schema.engine import (
    CannotCompile,
    accepts,
    client_schema,
    unenforced,
)
from tests.frontend.request.json_schema.library_schemas import cases

AB = {"a": {"type": "integer"}, "b": {"type": "string"}}
OPEN_NODE = {"properties": {"next": {"$ref": "#/$defs/n"}, "v": {"type": "integer"}}}

KEPT: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("unknown format", {"type": "string", "format": "password"}, ["x"], [1]),
    ("known format", {"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["x"]),
    ("leap day", {"format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29"]),
    ("hour", {"format": "time"}, ["23:59:59Z", "00:00:00.5-01:30"], ["24:00:00Z", "23:59:60Z"]),
    ("unknown keyword", {"type": "string", "x-order": 1}, ["x"], [1]),
    ("never", {"properties": {"a": {"not": {}}, "b": {}}}, [{"b": 1}], [{"a": 1, "b": 1}]),
    ("items of draft 7", {"items": [{"type": "integer"}]}, [[1, "a"]], [["a"]]),
    ("unique of one", {"uniqueItems": True, "maxItems": 1, "items": {}}, [[1]], [[1, 1]]),
    ("disjoint types", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    (
        "disjoint members",
        {"oneOf": [{"properties": {n: {}}, "required": [n], "type": "object"} for n in "ab"]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ("names", {"propertyNames": {"enum": ["a"]}, "type": "object"}, [{"a": 1}], [{"b": 1}]),
    ("pattern of names", {"propertyNames": {"pattern": "^x"}}, [{"xa": 1}], [{"a": 1}]),
    (
        "patterns of names",
        {"patternProperties": {"^x-": {"type": "integer"}, "^y-": {"type": "string"}}},
        [{"x-a": 1, "y-a": "b"}, {"z": None}],
        [{"x-a": "b"}],
    ),
    (
        "closed beside patterns",
        {"properties": {"a": {}}, "patternProperties": {"^x": {"type": "integer"}}},
        [{"a": 1}, {"xa": 1}],
        [{"b": 1}, {"xa": "b"}],
    ),
    ("at least one", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    (
        "closed across allOf",
        {
            "allOf": [{"properties": {"a": AB["a"]}}, {"$ref": "#/$defs/b"}],
            "$defs": {"b": {"properties": {"b": AB["b"]}}},
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1, "c": 1}, {"a": "x"}],
    ),
    (
        "required of alternatives",
        {"properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": "x"}],
        [{}, {"a": 1, "c": 2}],
    ),
    ("required, not declared", {"properties": AB, "required": ["c"]}, [{"c": 1}], [{"d": 1}]),
    (
        "unevaluated",
        {
            "$ref": "#/$defs/b",
            "properties": {"a": {}},
            "unevaluatedProperties": False,
            "$defs": {"b": {"properties": {"b": AB["b"]}}},
        },
        [{"b": "x", "a": 1}],
        [{"c": 1}, {"b": 1}],
    ),
    ("anchor", {"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "integer"}}}, [1], ["a"]),
    (
        "pointer",
        {"properties": {"a/b": AB["a"], "c": {"$ref": "#/properties/a~1b"}}},
        [{"c": 1}],
        [{"c": "x"}],
    ),
    (
        "circle",
        {"$ref": "#/$defs/n", "$defs": {"n": {**OPEN_NODE, "type": "object"}}},
        [{"next": {"v": 1}}],
        [{"next": 1}],
    ),
    ("bound of draft 4", {"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
]

DROPPED: list[tuple[Any, list[str], Any]] = [
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"], [1, 1]),
    ({"properties": {"a": {"not": {"const": 1}}}}, ["properties.a.not"], {"a": 1}),
    ({"contains": {"type": "integer"}, "type": "array"}, ["contains"], []),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, ["if"], "a"),
    ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"], {"a": 1}),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, ["dependentSchemas"], {"a": 1}),
    ({"dependencies": {"a": ["b"]}}, ["dependencies"], {"a": 1}),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ["propertyNames"], {"ab": 1}),
    ({"items": {"pattern": "^(?!a)"}}, ["items.pattern"], ["a"]),
    ({"pattern": r"\bx\b"}, ["pattern"], "ax"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["oneOf"], 3),
    ({"properties": AB, "minProperties": 1}, ["minProperties"], {}),
    ({"minProperties": 2, "type": "object"}, ["minProperties"], {"a": 1}),
    (
        {"patternProperties": {"^x": {}, "y$": {"type": "integer"}}},
        ["patternProperties"],
        {"xy": "a"},
    ),
    ({"unevaluatedItems": False, "prefixItems": [{}]}, ["unevaluatedItems"], [1, 2]),
    ({"$dynamicRef": "#x"}, ["$dynamicRef"], 1),
    ({"$ref": "https://example.com/schema"}, ["$ref"], 1),
    ({"$ref": "file:///etc/passwd"}, ["$ref"], 1),
    ({"multipleOf": 1000003, "type": "integer"}, ["multipleOf"], 2),
    ({"maximum": 10**30, "type": "integer"}, ["maximum"], 5),
    ({"const": 2**70}, ["const"], 1),
    (
        {
            "$defs": {
                "n": {"properties": {"n": {"$ref": "#/$defs/n", "required": ["v"]}, "v": {}}}
            },
            "$ref": "#/$defs/n",
        },
        ["$defs.n.properties.n.$ref"],
        {"v": 1},
    ),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT]
)
def test_what_the_engine_can_enforce_is_enforced(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    asked = client_schema(schema)
    assert unenforced(asked) == []
    assert [value for value in good if not accepts(asked, json.dumps(value))] == []
    assert [value for value in bad if accepts(asked, json.dumps(value))] == []


@pytest.mark.parametrize(
    ("schema", "keywords", "value"), DROPPED, ids=[str(case[1]) for case in DROPPED]
)
def test_what_cannot_be_enforced_is_named_and_refused_where_it_is_strict(
    schema: Any, keywords: list[str], value: Any
) -> None:
    asked = client_schema(schema)
    assert unenforced(asked) == keywords
    assert accepts(asked, json.dumps(value))
    with pytest.raises(InvalidRequest) as caught:
        _ = ClientSchema(schema, "asked", is_strict=True).enforced
    *path, keyword = keywords[0].split(".")
    place = ".".join(path) or "the root"
    assert str(caught.value) == f"asked: '{keyword}' at {place} cannot be enforced"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "'type' at the root"),
        ({"properties": {"a": {"type": []}}}, "'type' at properties.a"),
        ({"properties": []}, "'properties' at the root"),
        ({"items": {"enum": []}}, "'enum' at items"),
        ({"$ref": "#/$defs/a"}, "refers to nothing"),
        ({"anyOf": [3]}, "anyOf.0 must be a schema"),
        ({"required": [1]}, "'required'"),
        ({"minLength": -1}, "'minLength'"),
        (json.loads('{"items":' * 150 + "{}" + "}" * 150), "nested too deeply"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_schemas_are_refused_by_place(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _ = client_schema(schema).enforced


@pytest.mark.parametrize(("additional", "is_open"), [("declared", False), ("allowed", True)])
def test_members_that_are_not_declared_are_allowed_by_a_setting(
    additional: AdditionalProperties, is_open: bool
) -> None:
    asked = client_schema({"type": "object", "properties": AB}, additional)
    assert accepts(asked, '{"a": 1}')
    assert accepts(asked, '{"a": 1, "c": 2}') is is_open
    for schema in ({"type": "object"}, {"properties": AB, "additionalProperties": True}):
        assert accepts(client_schema(schema, additional), '{"c": 2}')


WORK: list[Any] = [
    {
        "properties": {
            str(i): {"allOf": [{"$ref": "#/$defs/b"}, {"title": "t"}]} for i in range(999)
        },
        "$defs": {"b": {"allOf": [{"properties": {str(i): {}}} for i in range(99)]}},
    },
    {"properties": {str(i): {"$ref": "#", "required": ["a"]} for i in range(999)}},
    {"enum": [[1] * 1000] * 1000},
    {"properties": {str(i): {"pattern": "(a|b)*" * 600} for i in range(60)}},
]


@pytest.mark.parametrize("schema", WORK, ids=["members", "circles", "values", "patterns"])
def test_schemas_that_take_too_much_work_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="too many parts"):
        _ = client_schema(schema).enforced


TIMES = {
    "2024-01-01T11:22:60-22:22": False,
    "2016-12-31T23:59:60Z": False,
    "2023-02-29T00:00:00Z": False,
    "2024-04-31T00:00:00Z": False,
    "2024-01-01T24:00:00Z": False,
    "2024-01-01T00:00:00+24:00": False,
    "2024-01-01T00:00:00": False,
    "2024-02-29T23:59:59Z": True,
    "2024-01-01T11:22:59.123456-22:22": True,
    "1999-12-31T00:00:00+00:00": True,
}


@pytest.mark.parametrize(("text", "is_written"), TIMES.items())
def test_times_are_those_that_parsers_read(text: str, is_written: bool) -> None:
    asked = client_schema({"type": "string", "format": "date-time"})
    assert accepts(asked, json.dumps(text)) is is_written
    if is_written:
        assert datetime.fromisoformat(text).tzinfo is not None


def test_annotations_take_no_room() -> None:
    long = {"description": "d" * 60_000, "title": "t", "examples": ["e" * 9000], "default": {}}
    asked = client_schema({"type": "object", "properties": {"a": {**long, "type": "integer"}}})
    assert len(json.dumps(asked.enforced)) < 200


@pytest.mark.parametrize(
    ("schema", "value", "keywords"),
    [case[1:] for case in cases()],
    ids=[case[0] for case in cases()],
)
def test_schemas_of_libraries_are_enforced(
    schema: dict[str, Any], value: Any, keywords: list[str] | None
) -> None:
    asked = client_schema(schema)
    assert keywords is None or unenforced(asked) == keywords
    assert accepts(asked, json.dumps(value, ensure_ascii=False))


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "ab", "b", 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Returns schemas of several keywords, whose parts come from `inner`."""
    members = st.dictionaries(NAMES, inner, max_size=2)
    lists = st.lists(inner, min_size=1, max_size=3)
    count = st.integers(0, 2)
    options: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "properties": members,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b", "c$"]), inner),
        "propertyNames": inner,
        "minProperties": count,
        "maxProperties": count,
        "unevaluatedProperties": st.booleans(),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": count,
        "maxItems": count,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minimum": st.integers(-2, 2),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "minLength": count,
        "maxLength": count,
        "pattern": st.sampled_from(["a", "^b", "b$", "^(?!a)", "(a|^b)b"]),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "allOf": lists,
        "anyOf": lists,
        "oneOf": lists,
        "not": inner,
        "if": inner,
        "then": inner,
        "$ref": st.just("#/$defs/d"),
    }
    chosen = st.lists(st.sampled_from(sorted(options)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: options[n] for n in names}))


SCHEMAS = st.recursive(st.booleans() | keywords(st.booleans()), keywords, max_leaves=6)


@given(
    schema=keywords(SCHEMAS),
    definition=keywords(st.booleans()).filter(lambda schema: "$ref" not in schema),
    values=st.lists(VALUES, min_size=8, max_size=16),
    additional=st.sampled_from(["declared", "allowed"]),
)
def test_no_invalid_value_keeps_a_schema_without_unenforced_keywords(
    schema: dict[str, Any],
    definition: dict[str, Any],
    values: list[Any],
    additional: AdditionalProperties,
) -> None:
    schema = {**schema, "$defs": {"d": definition}}
    asked = client_schema(schema, additional)
    if asked.unenforced:
        return
    validator = jsonschema_rs.Draft202012Validator(schema)
    for value in values:
        try:
            is_accepted = accepts(asked, json.dumps(value))
        except CannotCompile:
            return
        assert validator.is_valid(value) or not is_accepted, (value, asked.enforced)
