"""Objects of several kinds in one field of a body. A field of the object, such as `type`, names its
kind, and the kind decides which pydantic model reads the object.

The error for an object of an unsupported kind names the kind. The error of a plain union would name
a field that another kind requires.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH


class ExactModel(BaseModel):
    """Base class of the objects in a body. Values are not converted to the type of the field.
    Unknown fields are forbidden, except in `parse_body`, which accepts and then removes them."""

    model_config = ConfigDict(extra="forbid", strict=True)


class IndexedModel(ExactModel):
    """Base class of bodies whose errors write the index of an item in brackets: `documents[3]`."""


def _refuse(name: str) -> str:
    raise ValueError(f"{name[:MAX_NAME_LENGTH]!r} is not supported")


class Unknown(ExactModel):
    """Base class of objects of a kind that the server does not support."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"title": cls.__name__, "not": {}}


class UnknownKind(Unknown):
    """An object of a type that the server does not support. Reading such an object raises an
    error."""

    type: Annotated[str, AfterValidator(_refuse)]


class LeftOutItem(Unknown):
    """An item of a list whose type the server does not support. The item is left out of the prompt,
    and the reader of bodies reports it like an unknown field."""

    type: str


class UnknownRole(Unknown):
    """A turn of a conversation with an unknown role. Reading such a turn raises an error."""

    role: Annotated[str, AfterValidator(_refuse)]


def by_type(
    tags: Mapping[str, str],
    *,
    field: str = "type",
    default: str = "",
    others: str | Callable[[Mapping[str, Any]], str] = "unknown",
    text: str = "",
) -> Discriminator:
    """Returns a pydantic discriminator, which chooses the model for an object by the value of the
    object's `field`.

    `tags` maps each known value to the tag of a model in the union. An object without the field is
    treated as if the value were `default`. An object with any other value has the tag `others`; if
    `others` is a function, the function returns the tag of the object. If `text` is given, a text
    in place of an object has the tag `text`.
    """
    refused = others if isinstance(others, str) else "unknown"

    def tag_of(value: Any) -> str:
        if text and isinstance(value, str):
            return text
        kind = value.get(field) if isinstance(value, dict) else None
        kind = default if kind is None else kind
        if not isinstance(kind, str) or not isinstance(value, dict):
            return refused
        if kind in tags or not kind or isinstance(others, str):
            return tags.get(kind, refused)
        return others(value)

    return Discriminator(tag_of)
