"""The types of texts in a conversation of POST /v1/responses. A text is a string or a list of
parts."""

from typing import Annotated, Literal

from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.frontend.http.bodies.object_kinds import ExactModel, by_type
from services.frontend.http.protocol.text_parts import TEXT_OR_LIST, RefusalPart
from services.frontend.http.protocol.unknown_items import (
    LEFT_OUT,
    LeftOut,
    Refused,
    tag_of_unknown,
)
from services.frontend.request.conversation import MAX_TURNS


class ResponsesPart(ExactModel):
    """One part of a text that is given as a list of parts."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    """Kind of the part. Parts of all kinds are treated equally."""
    text: str
    """Text of the part; several parts are joined by line ends."""


_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_TAGS = {**dict.fromkeys(_TEXT_TYPES, "text"), "refusal": "refusal"}

Part = Annotated[
    Annotated[ResponsesPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | LeftOut
    | Refused,
    by_type(_TAGS, others=tag_of_unknown),
]
ResponsesParts = TypeAliasType(
    "ResponsesParts", Annotated[list[Part], FailFast(), Field(max_length=MAX_TURNS)]
)
Text = Annotated[Annotated[str, Tag("text")] | Annotated[ResponsesParts, Tag("list")], TEXT_OR_LIST]
"""Type of a text that the user may have written: one string or a list of parts."""

MadePart = Annotated[
    Annotated[ResponsesPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")] | LeftOut,
    by_type(_TAGS, others=LEFT_OUT),
]
MadeParts = TypeAliasType(
    "MadeParts", Annotated[list[MadePart], FailFast(), Field(max_length=MAX_TURNS)]
)
MadeText = Annotated[Annotated[str, Tag("text")] | Annotated[MadeParts, Tag("list")], TEXT_OR_LIST]
"""Type of a text that a model or a tool has written: one string or a list of parts. Parts of other
kinds are accepted, but left out or replaced by a note."""
