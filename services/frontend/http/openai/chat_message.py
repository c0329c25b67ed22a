"""A message of a conversation, as clients of OpenAI and of other servers send it. Clients send an
assistant's message back with all fields that some server wrote into it. Unknown fields are
therefore ignored, and named in a header of the answer and in the log."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, FailFast, Field, Tag, ValidationInfo
from typing_extensions import TypeAliasType

from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel, by_type
from services.frontend.http.protocol.conversation_tools import json_text
from services.frontend.http.protocol.text_parts import (
    TEXT_OR_LIST,
    RefusalPart,
    joined,
    result_text,
)
from services.frontend.http.protocol.unknown_items import LeftOut, Refused, tag_of_unknown
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, EarlierCall

MAX_CALLS = 128
"""Largest number of calls of tools in a message."""


class ContentPart(ExactModel):
    """A text as a part of a message's content."""

    type: Literal["text"]
    """Kind of the part."""
    text: str
    """Text of the part; several parts are joined by line ends."""


Part = Annotated[
    Annotated[ContentPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | LeftOut
    | Refused,
    by_type({"text": "text", "refusal": "refusal"}, others=tag_of_unknown),
]
ContentParts = TypeAliasType(
    "ContentParts", Annotated[list[Part], FailFast(), Field(max_length=MAX_TURNS)]
)
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[ContentParts, Tag("list")], TEXT_OR_LIST
]
"""Type of a message's text, which is one string or a list of parts."""


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
    """The called function and the arguments."""

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
    """A turn of a conversation. A client may send a message of the assistant back unchanged."""

    role: str
    """Role of the speaker. The chat template must know the role. `developer` is read as `system` if
    the template does not know `developer`."""
    content: Annotated[
        Content | None, AfterValidator(_check_content), Field(validate_default=True)
    ] = None
    """Content of the message, as a text or in parts. A picture is replaced by a note. An
    assistant's message may have null or no content."""
    name: str | None = None
    """Name of the speaker, for templates that show the name."""
    refusal: str | None = None
    """Refusal of the assistant in a message without `content`."""
    tool_calls: AssistantCalls | None = None
    """Calls that the assistant made in this turn, in their order."""
    tool_call_id: str | None = None
    """Id of the call whose result this turn is."""
    reasoning_content: str | None = None
    """Reasoning of the assistant before the text of the message."""
    reasoning: str | None = None
    """Another spelling of `reasoning_content`."""
    annotations: Any = None
    """Does nothing: clients send the field back with messages of the assistant."""
    provider_specific_fields: Any = None
    """Does nothing: clients send the field back with messages of the assistant."""
    audio: Annotated[dict[str, Any] | None, only()] = None
    """Not served."""
    function_call: AssistantFunction | None = None
    """OpenAI's older form of `tool_calls`, which can have only one call. The result of the call is
    in the next message, which has the role `function`."""

    def to_message(self) -> ChatMessage:
        """Returns the turn in the form that chat templates read."""
        if self.role == "function":
            return self._as_tool().to_message()
        content = self.content
        if content is None:
            content = self.refusal
        elif self.role == "tool":
            content = result_text(content)
        else:
            content = joined(content)
        return ChatMessage(
            self.role,
            content,
            self.name,
            tool_calls=tuple(call.to_call() for call in self._calls()),
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content or self.reasoning,
        )

    def _calls(self) -> list[AssistantCall]:
        """Returns the calls of the turn. A call in the older form, `function_call`, has no id, so
        the name of the function is taken as its id."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [AssistantCall(id=self.function_call.name, function=self.function_call)]

    def _as_tool(self) -> Self:
        """Returns a message of the older role `function` as a message of the role `tool`."""
        return self.model_copy(update={"role": "tool", "tool_call_id": self.name})
