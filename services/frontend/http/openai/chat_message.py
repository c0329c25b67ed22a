"""A message of a conversation, as clients of OpenAI and of other servers send it. A server may add
fields to the assistant's messages, and clients send these messages back with all fields. Unknown
fields are therefore ignored, and named in a header of the answer and in the log."""

from typing import Annotated, Any, Literal

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
from services.frontend.http.protocol.unknown_items import (
    LEFT_OUT,
    LeftOut,
    Refused,
    tag_of_unknown,
)
from services.frontend.request.conversation import MAX_TURNS, ChatMessage, EarlierCall

MAX_CALLS = 128
"""Largest number of calls of tools in a message."""


class ContentPart(ExactModel):
    """A text as a part of a message's content."""

    type: Literal["text"]
    """Always `text`."""
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

MadePart = Annotated[
    Annotated[ContentPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")] | LeftOut,
    by_type({"text": "text", "refusal": "refusal"}, others=LEFT_OUT),
]
MadeContentParts = TypeAliasType(
    "MadeContentParts", Annotated[list[MadePart], FailFast(), Field(max_length=MAX_TURNS)]
)
MadeContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[MadeContentParts, Tag("list")], TEXT_OR_LIST
]
"""Type of a text that a model or a tool has written: one string or a list of parts. Parts of
unsupported types are left out, because they hold no text of the user."""


class AssistantFunction(ExactModel):
    """The name and the arguments of a call."""

    name: str
    """Name of the function."""
    arguments: str | dict[str, Any] | None = None
    """Arguments, as the text of a JSON object or as the object itself."""


class AssistantCall(ExactModel):
    """An earlier call of a tool by the assistant."""

    id: str | None = None
    """Id of the call."""
    type: Literal["function"] | None = None
    """Always `function`; may be left out."""
    function: AssistantFunction
    """The called function and the arguments."""

    def to_call(self) -> EarlierCall:
        """Returns the call in the form that all protocols share."""
        arguments = self.function.arguments
        if isinstance(arguments, dict):
            arguments = json_text(arguments)
        return EarlierCall(self.id or "", self.function.name, arguments or "{}")


AssistantCalls = TypeAliasType(
    "AssistantCalls", Annotated[list[AssistantCall], FailFast(), Field(max_length=MAX_CALLS)]
)


class MessageFields(ExactModel):
    """The fields of a message besides its content. They include all fields of the assistant's
    messages in answers, so that clients can send these messages back unchanged."""

    role: str
    """Role of the speaker."""
    name: str | None = None
    """Name of the speaker, for templates that show the name."""
    refusal: str | None = None
    """Refusal of the assistant in a message without `content`."""
    tool_calls: AssistantCalls | None = None
    """Calls that the assistant made in this turn, in their order."""
    tool_call_id: str | None = None
    """Id of the call whose result this message is."""
    reasoning_content: str | None = None
    """Reasoning of the assistant before the text of the message."""
    reasoning: str | None = None
    """Another spelling of `reasoning_content`."""
    annotations: Any = None
    """Does nothing: clients send the field back with messages of the assistant."""
    provider_specific_fields: Any = None
    """Does nothing: clients send the field back with messages of the assistant."""
    audio: Annotated[dict[str, Any] | None, only()] = None
    """Not supported: must be null."""
    function_call: AssistantFunction | None = None
    """OpenAI's older form of `tool_calls`, which can have only one call. The result of the call is
    in the next message, which has the role `function`."""

    def with_content(self, content: str | None) -> ChatMessage:
        """Returns the message in the form that chat templates read, with `content`, or with the
        refusal if `content` is None. The older role `function` becomes `tool`."""
        is_function = self.role == "function"
        return ChatMessage(
            "tool" if is_function else self.role,
            self.refusal if content is None else content,
            self.name,
            tool_calls=tuple(call.to_call() for call in self._calls()),
            tool_call_id=self.name if is_function else self.tool_call_id,
            reasoning_content=self.reasoning_content or self.reasoning,
        )

    def _calls(self) -> list[AssistantCall]:
        """Returns the calls of the turn. A call in the older form, `function_call`, has no id, so
        the name of the function is taken as its id."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [AssistantCall(id=self.function_call.name, function=self.function_call)]


MADE_ROLES = ("assistant", "tool", "function")
"""Roles of the messages that models and tools write."""


class AskedMessage(MessageFields):
    """A message of the user, of the system, or of another role that neither a model nor a tool
    has."""

    role: Annotated[str, Field(json_schema_extra={"not": {"enum": list(MADE_ROLES)}})]
    """Role of the speaker. The chat template must support the role. `developer` is read as `system`
    if the template does not support `developer`."""
    content: Content
    """Content of the message, as a text or in parts. A picture is replaced by a note."""

    def to_message(self) -> ChatMessage:
        """Returns the message in the form that chat templates read."""
        return self.with_content(joined(self.content))


def _check_content(content: object, message: ValidationInfo) -> object:
    if content is None and message.data.get("role") != "assistant":
        raise ValueError("must be given; only an assistant's may be null")
    return content


class MadeMessage(MessageFields):
    """A message of the assistant, or the result of a tool."""

    role: Literal["assistant", "tool", "function"]
    """`assistant`, `tool`, or OpenAI's older spelling `function` of `tool`."""
    content: Annotated[
        MadeContent | None, AfterValidator(_check_content), Field(validate_default=True)
    ] = None
    """Content of the message, as a text or in parts. A picture is replaced by a note. Other parts
    that are no text are left out of an assistant's message, and replaced by a note in the result of
    a tool. An assistant's message may have null or no content."""

    def to_message(self) -> ChatMessage:
        """Returns the message in the form that chat templates read."""
        if self.content is None:
            return self.with_content(None)
        is_result = self.role != "assistant"
        return self.with_content((result_text if is_result else joined)(self.content))


Message = Annotated[
    Annotated[AskedMessage, Tag("asked")] | Annotated[MadeMessage, Tag("made")],
    by_type(dict.fromkeys(MADE_ROLES, "made"), field="role", others="asked"),
]
Messages = TypeAliasType(
    "Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_TURNS)]
)
