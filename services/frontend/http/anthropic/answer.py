"""The types of the answers in Anthropic's protocol."""

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


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@answer_object
class AnthropicMessage(TypedDict):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
