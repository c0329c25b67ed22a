"""Converts the arguments of calls to JSON, for formats in which arguments are written as texts. The
schema of the tool says which type each argument has.

    path = a.py        {"path": "a.py"}       the schema says string
    n = 3              {"n": 3}               the schema says integer
    force = True       {"force": true}        the schema says boolean

A text that cannot have one of the types in its schema becomes a string, so that nothing is lost.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic_core

from services.frontend.text.formats.literals import literal_as_json

Types = frozenset[str] | None
"""Set of the types that a value may have, by their names in JSON Schema. None stands for any
type."""

TEXT: Types = frozenset(("string",))

ANY_VALUE: Types = None

MAX_VISITS = 64
"""Largest number of schemas that are examined to find the types of a value. If there are more, the
value may have any type."""


class Parameters:
    """The parameters that a tool's schema declares."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the schema."""
        return tuple(self._properties)

    def types(self, name: str) -> Types:
        """Returns the types that a parameter may have."""
        declared = self._properties.get(name, self._schema.get("additionalProperties"))
        return types_of(declared, self._schema)


def read_schema(text: str) -> Mapping[str, Any]:
    """Returns the object in a JSON text. Returns an empty object if the text is not a JSON
    object."""
    try:
        value = pydantic_core.from_json(text.encode())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def types_of(schema: object, root: Mapping[str, Any]) -> Types:
    """Returns the types that the values of a schema may have. `root` is the whole schema, in which
    references are looked up."""
    return _types_of(schema, root, iter(range(MAX_VISITS)))


def _types_of(schema: object, root: Mapping[str, Any], visits: Iterator[int]) -> Types:
    if not isinstance(schema, dict) or next(visits, None) is None:
        return ANY_VALUE
    declared = schema.get("type")
    if isinstance(declared, (str, list)):
        types = {declared} if isinstance(declared, str) else set(map(str, declared))
        return frozenset(types | {"null"} if schema.get("nullable") is True else types)
    if "const" in schema:
        return frozenset((type_of(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    if isinstance(schema.get("$ref"), str):
        return _types_of(resolved(schema["$ref"], root), root, visits)
    for combined in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(combined), list):
            found = [_types_of(one, root, visits) for one in schema[combined]]
            known = [one for one in found if one is not None]
            if combined == "allOf":
                return frozenset.intersection(*known) if known else ANY_VALUE
            return frozenset().union(*known) if len(known) == len(found) else ANY_VALUE
    return ANY_VALUE


def resolved(reference: str, root: Mapping[str, Any]) -> object:
    """Returns the schema to which a reference such as `#/$defs/Name` refers. Returns None if there
    is no such schema."""
    if not reference.startswith("#"):
        return None
    found: object = root
    for part in filter(None, reference[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def type_of(value: object) -> str:
    """Returns the name of a value's type in JSON Schema."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def text_as_json(text: str, types: Types) -> str:
    """Returns the text of an argument as JSON of one of the given types. A type other than string
    is preferred if the text fits it. A text that fits no other type becomes a JSON string."""
    if types == TEXT:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    if _has_type(stripped, types):
        return stripped
    value = literal_as_json(stripped)
    if value is not None and _has_type(value, types):
        return value
    return json.dumps(text, ensure_ascii=False)


def _has_type(text: str, types: Types) -> bool:
    """Returns whether a text is JSON of one of the types, and is not a JSON string."""
    try:
        found = type_of(pydantic_core.from_json(text, allow_inf_nan=False))
    except ValueError:
        return False
    if found == "string":
        return False
    return types is None or found in types or (found == "integer" and "number" in types)
