"""A message of a conversation, as OpenAI's clients send it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.frontend.http.accepted_values import only
from services.frontend.request.conversation import ChatMessage

MAX_TURNS = 2048
"""Messages of a conversation at most, and parts of a message: each costs more than its bytes."""


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


TextParts = TypeAliasType(
    "TextParts", Annotated[list[TextPart], FailFast(), Field(max_length=MAX_TURNS)]
)

Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextParts, Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]
"""A message's text, whole or in parts."""


class Message(BaseModel):
    """A turn of a conversation; an assistant's message may be sent back as it came."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: Content
    name: str | None = None
    refusal: Annotated[str | None, only("")] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    tool_calls: Annotated[list[Any] | None, only([])] = None
    tool_call_id: Annotated[str | None, only()] = None
    function_call: Annotated[dict[str, Any] | None, only()] = None

    def to_message(self) -> ChatMessage:
        """Returns the turn as templates want it."""
        text = self.content
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        return ChatMessage(self.role, text, self.name)
