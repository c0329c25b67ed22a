"""A message of a conversation, as clients of OpenAI and of other servers send it.

Unknown fields are ignored and named: clients send an assistant's message back with all that its
server wrote into it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from typing_extensions import TypeAliasType

from services.common import errors
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.protocol.conversation_tools import json_text
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, EarlierCall

MAX_CALLS = 128
"""Largest number of calls of tools in a message."""


def _check_kind(kind: str) -> str:
    if kind not in ("text", "refusal"):
        raise ValueError(f"{errors.shortened(kind)!r} is not supported; only 'text' is")
    return kind


class ContentPart(ExactModel):
    """A part of a message's content: a text, or what the assistant said instead of one."""

    type: Annotated[str, AfterValidator(_check_kind)]
    """Kind of the part: `text` or `refusal`."""
    text: str | None = None
    """Text; several parts are joined by line ends."""
    refusal: str | None = None
    """What the assistant said in a part of the kind `refusal`."""

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise ValueError(f"must have a field {self.type!r}")
        return self

    @property
    def content(self) -> str:
        """The part's text."""
        return (self.text if self.type == "text" else self.refusal) or ""


ContentParts = TypeAliasType(
    "ContentParts", Annotated[list[ContentPart], FailFast(), Field(max_length=MAX_TURNS)]
)

Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[ContentParts, Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]
"""A message's text, whole or in parts."""


class AssistantFunction(ExactModel):
    """The name and the arguments of a call."""

    name: str
    """Name of the function."""
    arguments: str | dict[str, Any] | None = None
    """Arguments, as the text of a JSON object or as the object itself."""


class AssistantCall(ExactModel):
    """A call of a tool that the assistant made before."""

    id: str | None = None
    """Id of the call."""
    type: Literal["function"] | None = None
    """Kind of the call."""
    function: AssistantFunction
    """What was called."""

    def to_call(self) -> EarlierCall:
        """Returns the call."""
        arguments = self.function.arguments
        if isinstance(arguments, dict):
            arguments = json_text(arguments)
        return EarlierCall(self.id or "", self.function.name, arguments or "{}")


AssistantCalls = TypeAliasType(
    "AssistantCalls", Annotated[list[AssistantCall], FailFast(), Field(max_length=MAX_CALLS)]
)


def _check_content(content: object, message: ValidationInfo) -> object:
    if content is None and message.data.get("role") != "assistant":
        raise ValueError("must be given; only an assistant's may be null")
    return content


class Message(ExactModel):
    """A turn of a conversation; an assistant's message may be sent back as it came."""

    role: str
    """Whose turn it is: what the chat template knows. `developer` is `system` where the template
    knows no developers."""
    content: Annotated[
        Content | None, AfterValidator(_check_content), Field(validate_default=True)
    ] = None
    """What was said, as a text or in parts; an assistant's may be null or left out."""
    name: str | None = None
    """Name of the speaker, for templates that show it."""
    refusal: str | None = None
    """What an assistant said that has no `content`."""
    tool_calls: AssistantCalls | None = None
    """Calls that the assistant made in this turn, in their order."""
    tool_call_id: str | None = None
    """Id of the call whose result this turn is."""
    reasoning_content: str | None = None
    """What the assistant thought before it spoke."""
    reasoning: str | None = None
    """Another spelling of `reasoning_content`."""
    annotations: Any = None
    """As clients send them back; does nothing."""
    provider_specific_fields: Any = None
    """As clients send them back; does nothing."""
    audio: Annotated[dict[str, Any] | None, only()] = None
    """Not served."""
    function_call: Annotated[dict[str, Any] | None, only()] = None
    """OpenAI's older spelling of `tool_calls`; not served."""

    def to_message(self) -> ChatMessage:
        """Returns the turn as templates want it."""
        content = self.content
        if content is None:
            content = self.refusal
        elif not isinstance(content, str):
            content = "\n".join(part.content for part in content)
        return ChatMessage(
            self.role,
            content,
            self.name,
            tool_calls=tuple(call.to_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content or self.reasoning,
        )
