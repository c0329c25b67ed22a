"""Finds out whether several schemas exclude each other, which means that no value matches two of
them.

The grammar engine can enforce only `anyOf`: a value matches at least one of the schemas. `oneOf`
demands exactly one. If the schemas exclude each other, both keywords mean the same, so `oneOf` can
be enforced as `anyOf`.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from services.frontend.request.json_schema.references import Part, References

MAX_ALTERNATIVES = 64
"""Largest number of alternatives in `oneOf` that are compared with each other."""

MAX_REFERENCES = 8
"""Largest length of a chain of references that is followed."""

_TYPES = {"null", "boolean", "object", "array", "number", "string"}


class Alternatives:
    """Compares the schemas that a keyword such as `oneOf` lists."""

    def __init__(self, references: References, *, are_closed: bool) -> None:
        """`are_closed` says whether generated objects have only the members that their schema
        declares."""
        self._references = references
        self._are_closed = are_closed

    def are_disjoint(self, parts: Sequence[Part]) -> bool:
        """Returns whether the schemas `parts` exclude each other: a value that is generated for one
        of them never matches another. Returns False also if this cannot be found out. Raises
        WrongSchema if the check takes too much work."""
        if len(parts) > MAX_ALTERNATIVES:
            return False
        found = [self._followed(part) for part in parts]
        listed = [_values(part.value) if isinstance(part.value, dict) else None for part in found]
        values = [one for one in listed if one is not None]
        if len(values) == len(found) and sum(map(len, values)) == len(set().union(*values)):
            return True
        pairs = itertools.combinations(found, 2)
        return all(self._exclude(one, other) for one, other in pairs)

    def _followed(self, part: Part) -> Part:
        """Returns the part of the schema to which the `$ref` of a part leads, or the part itself if
        it has no `$ref`."""
        for _ in range(MAX_REFERENCES):
            part = self._references.find(part) or part
        return part

    def _exclude(self, one: Part, other: Part) -> bool:
        self._references.work.spend(2)
        a, b = one.value, other.value
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        if _types(a).isdisjoint(_types(b)):
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None and values_a.isdisjoint(values_b):
            return True
        if not (_types(a) & _types(b) <= {"object"}):
            return False
        for name in _required(a) & _required(b):
            if self._exclude(self._member(one, name), self._member(other, name)):
                return True
        return self._lacks(a, _required(b)) and self._lacks(b, _required(a))

    def _member(self, part: Part, name: str) -> Part:
        members = part.value.get("properties")
        if not isinstance(members, dict) or name not in members:
            return Part(True)
        return self._followed(part.member("properties", name))

    def _lacks(self, schema: dict[str, Any], names: set[str]) -> bool:
        """Returns whether every object that is generated for a schema lacks at least one of the
        given members."""
        if any(name in schema for name in ("patternProperties", "allOf", "anyOf", "oneOf", "$ref")):
            return False
        members = schema.get("properties")
        is_closed = schema.get("additionalProperties") is False
        if self._are_closed and members and "additionalProperties" not in schema:
            is_closed = "unevaluatedProperties" not in schema
        if not is_closed or not isinstance(members, dict | None):
            return False
        return not names <= {*(members or ()), *_required(schema)}


def _types(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if isinstance(kinds, list):
        return {"number" if kind == "integer" else str(kind) for kind in kinds}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    return set(_TYPES)


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _values(schema: dict[str, Any]) -> set[str] | None:
    """Returns the values that a schema allows, as JSON texts, if the schema lists them. Returns
    None otherwise."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(_with_whole_numbers(value), sort_keys=True) for value in values}


def _with_whole_numbers(value: Any) -> Any:
    """Returns a value in which floats without a fraction are replaced by integers. In JSON Schema
    1.0 and 1 are the same number."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_whole_numbers(item) for item in value]
        case dict():
            return {name: _with_whole_numbers(item) for name, item in value.items()}
    return value


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
