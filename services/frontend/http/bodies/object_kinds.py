"""Objects of several kinds in one field of a body: the kind, a field of the object, chooses the
model.

An object of a kind that is not served is refused by the name of its kind, and not by the first
field that another model misses.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH


class ExactModel(BaseModel):
    """An object of a body. It has no other fields than its own, since the reader of bodies leaves
    unknown fields out, and no value is converted to the type of its field."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _refuse(name: str) -> str:
    raise ValueError(f"{name[:MAX_NAME_LENGTH]!r} is not supported")


class Unknown(ExactModel):
    """An object of a kind that is not served; reading such an object raises an error."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"title": cls.__name__, "not": {}}


class UnknownKind(Unknown):
    """An object of a type that is not served."""

    type: Annotated[str, AfterValidator(_refuse)]


class UnknownRole(Unknown):
    """A turn of a role that is not known."""

    role: Annotated[str, AfterValidator(_refuse)]


def by_type(
    tags: Mapping[str, str],
    *,
    field: str = "type",
    default: str = "",
    others: str = "unknown",
    text: str = "",
) -> Discriminator:
    """Returns a discriminator that chooses among models by the value of an object's `field`. The
    value's tag is in `tags`; an object without the field has the value `default`, and other values
    have the tag `others`. A text has the tag `text`, if that is given."""

    def tag_of(value: Any) -> str:
        if text and isinstance(value, str):
            return text
        kind = value.get(field) if isinstance(value, dict) else None
        kind = default if kind is None else kind
        return tags.get(kind, others) if isinstance(kind, str) else others

    return Discriminator(tag_of)
