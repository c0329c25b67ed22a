"""Objects of several kinds in one field of a body. A field of the object, such as `type`, names the
kind and so chooses the model.

The error for an object of a kind that is not served names the kind. Without this module the error
would name the first field that another model misses.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH


class ExactModel(BaseModel):
    """Base class of the objects in a body. Values are not converted to the type of the field.
    Unknown fields are forbidden here, since the reader of bodies removes unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _refuse(name: str) -> str:
    raise ValueError(f"{name[:MAX_NAME_LENGTH]!r} is not supported")


class Unknown(ExactModel):
    """An object of a kind that is not served. Reading such an object raises an error."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"title": cls.__name__, "not": {}}


class UnknownKind(Unknown):
    """An object of a type that is not served."""

    type: Annotated[str, AfterValidator(_refuse)]


class UnknownRole(Unknown):
    """A turn of a conversation with an unknown role."""

    role: Annotated[str, AfterValidator(_refuse)]


def by_type(
    tags: Mapping[str, str],
    *,
    field: str = "type",
    default: str = "",
    others: str = "unknown",
    text: str = "",
) -> Discriminator:
    """Returns a discriminator that chooses among models by the value of an object's `field`. `tags`
    has the tag of each value. An object without the field is treated as if the value were
    `default`. Values that are not in `tags` have the tag `others`. A text instead of an object has
    the tag `text`, if `text` is given."""

    def tag_of(value: Any) -> str:
        if text and isinstance(value, str):
            return text
        kind = value.get(field) if isinstance(value, dict) else None
        kind = default if kind is None else kind
        return tags.get(kind, others) if isinstance(kind, str) else others

    return Discriminator(tag_of)
