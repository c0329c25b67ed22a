"""JSON schemas of bodies and answers. The description of a field is the docstring below the
field."""

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from services.frontend.http.bodies.field_docs import field_docs
from services.frontend.http.bodies.object_kinds import ExactModel


def schema_of_type(kind: Any, ref_template: str = "#/$defs/{model}") -> JsonSchemaValue:
    """Returns the schema of a model or of a typed dictionary. Other schemas that the schema refers
    to are in `$defs`."""
    return TypeAdapter(kind).json_schema(
        ref_template=ref_template, schema_generator=_DescribedSchemas
    )


class _DescribedSchemas(GenerateJsonSchema):
    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described, kind = super().model_schema(schema), schema["cls"]
        for base in kind.__mro__[: kind.__mro__.index(ExactModel)][::-1]:
            names = {name: field.alias or name for name, field in kind.model_fields.items()}
            for name, text in field_docs(base).items():
                if name in names:
                    described["properties"][names[name]]["description"] = text
        return described

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        described = super().typed_dict_schema(schema)
        for base in _with_bases(schema["cls"]):
            for name, text in field_docs(base).items():
                described["properties"][name]["description"] = text
        return described


def _with_bases(kind: Any) -> Iterator[type]:
    """Yields a typed dictionary and all typed dictionaries from which it inherits."""
    if hasattr(kind, "__required_keys__"):
        yield kind
        for base in getattr(kind, "__orig_bases__", ()):
            yield from _with_bases(base)
