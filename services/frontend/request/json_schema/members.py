"""Collects the members that an object's schema declares, including the members in all schemas that
apply to the same object."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.frontend.request.json_schema.references import Part, References

COMBINING = ("allOf", "anyOf", "oneOf")
"""Keywords that hold a list of schemas. The schemas apply to the same value as the schema with the
keyword."""

_OF_OBJECTS = ("properties", "required", "patternProperties", "additionalProperties")


@dataclass(slots=True)
class Declared:
    """The members that are declared by all schemas which apply to one object."""

    names: dict[str, None] = field(default_factory=dict)
    """Names of the declared members, in order."""
    has_properties: bool = False
    is_explicit: bool = False
    """Whether one of the schemas says which other members are allowed."""
    has_choices: bool = False
    """Whether some of the members are declared only by one of several alternatives."""


def is_combined(schema: dict[str, Any]) -> bool:
    """Returns whether several schemas apply to the same object, so more than one of them may
    declare members: the schema itself, and the schemas in its `$ref`, `allOf`, `anyOf` and
    `oneOf`."""
    n_places = sum(name in schema for name in ("$ref", "anyOf", "oneOf"))
    branches = schema.get("allOf")
    n_places += len(branches) if isinstance(branches, list) else 0
    n_places += any(name in schema for name in _OF_OBJECTS)
    return n_places > 1


def declared(part: Part, references: References) -> Declared:
    """Returns the members that a schema declares, including the members that are declared by its
    `$ref` and by the schemas in its `allOf`, `anyOf` and `oneOf`. Raises WrongSchema if the schema
    takes too much work."""
    found = Declared()
    for schema, is_choice in _applied(part, references):
        names = dict.fromkeys(_names(schema))
        found.has_choices |= is_choice and not names.keys() <= found.names.keys()
        found.names.update(names)
        found.has_properties |= isinstance(schema.get("properties"), dict)
        found.is_explicit |= "additionalProperties" in schema or (
            schema is not part.value
            and ("patternProperties" in schema or "unevaluatedProperties" in schema)
        )
    return found


def _applied(part: Part, references: References) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields each schema that applies to the values of a part, once, with a flag that says whether
    the schema is one of several alternatives."""
    unseen: list[tuple[Part, bool]] = [(part, False)]
    seen: set[int] = set()
    while unseen:
        found, is_choice = unseen.pop(0)
        references.work.spend()
        if id(found.value) in seen or not isinstance(found.value, dict):
            continue
        seen.add(id(found.value))
        yield found.value, is_choice
        for keyword in COMBINING:
            branches = found.value.get(keyword)
            for place in range(len(branches)) if isinstance(branches, list) else ():
                unseen.append((found.member(keyword, place), is_choice or keyword != "allOf"))
        if (referred := references.find(found)) is not None:
            unseen.append((referred, is_choice))


def _names(schema: dict[str, Any]) -> Iterator[str]:
    members, required = schema.get("properties"), schema.get("required")
    if isinstance(members, dict):
        yield from members
    if isinstance(required, list):
        yield from (name for name in required if isinstance(name, str))
