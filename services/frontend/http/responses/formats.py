"""Types of the field `text`, which sets the format of the output, in a body of POST
/v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from services.frontend.http.bodies.object_kinds import ExactModel, UnknownKind, by_type


class ResponsesTextFormat(ExactModel):
    """An output format: any text."""

    type: Literal["text"]
    """`text`: the output may be any text."""


class ResponsesJsonFormat(ExactModel):
    """An output format: a JSON object."""

    type: Literal["json_object"]
    """`json_object`: the output is a JSON object."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """A JSON schema that the object must match. Without a schema, any object is allowed."""


class ResponsesSchemaFormat(ExactModel):
    """An output format: JSON that matches a schema."""

    type: Literal["json_schema"]
    """`json_schema`: the output is JSON that matches a schema."""
    name: str
    """Name of the schema; does nothing."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON schema."""
    strict: bool | None = None
    """Whether the request is refused if a keyword of the schema cannot be enforced. Otherwise the
    answer names the keyword in the header `x-orcinus-unenforced`."""


Format = Annotated[
    Annotated[ResponsesTextFormat, Tag("text")]
    | Annotated[ResponsesJsonFormat, Tag("json_object")]
    | Annotated[ResponsesSchemaFormat, Tag("json_schema")]
    | Annotated[UnknownKind, Tag("unknown")],
    by_type({kind: kind for kind in ("text", "json_object", "json_schema")}),
]


class TextOptions(ExactModel):
    """Options of the text of the answer. The only option is the format."""

    format: Format | None = None
    """Format of the text. Without a format, any text is allowed."""
