"""The answers of Anthropic's paths, described for the OpenAPI document."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class AnthropicText(TypedDict):
    """A text of the model."""

    type: Literal["text"]
    text: str


@answer_object
class AnthropicThinking(TypedDict):
    """Reasoning of the model; nobody checks the signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


@answer_object
class AnthropicToolUse(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@answer_object
class AnthropicUsage(TypedDict):
    """Tokens read and written."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


@answer_object
class AnthropicMessage(TypedDict):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


@answer_object
class TokenCount(TypedDict):
    """The number of tokens that a conversation would start with."""

    input_tokens: int


@answer_object
class AnthropicErrorObject(TypedDict):
    """An error; its message begins with the field that is wrong, if it is one."""

    type: str
    message: str


@answer_object
class AnthropicError(TypedDict):
    """The body of answers that refuse a request in Anthropic's protocol."""

    type: Literal["error"]
    error: AnthropicErrorObject
