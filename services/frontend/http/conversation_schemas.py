"""The answers of `/v1/responses` and `/v1/messages`, described for the OpenAPI document.

Tests hold these types against what a server says.
"""

from typing import Any, Literal

from pydantic import ConfigDict
from typing_extensions import TypedDict

from services.frontend.http.messages_request import CountBody, MessagesBody
from services.frontend.http.responses_request import ResponsesBody

_EXACT = ConfigDict(extra="forbid")


class OutputText(TypedDict):
    """A text of the model."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(TypedDict):
    """Reasoning of the model."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(TypedDict):
    """A message of the model."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """The reasoning before a message or a call."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    """A call of a function; its arguments are JSON."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(TypedDict):
    """Tokens that need not be read again, of which there are none yet."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Tokens of reasoning, which are not counted apart."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens read and written."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    """The reason why a response failed."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    code: str
    message: str


class Response(TypedDict):
    """The answer of POST /v1/responses; nothing is stored. The last fields repeat the request."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float


class AnthropicText(TypedDict):
    """A text of the model."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: Literal["text"]
    text: str


class AnthropicThinking(TypedDict):
    """Reasoning of the model; nobody checks the signature."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicToolUse(TypedDict):
    """A call of a tool."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(TypedDict):
    """Tokens read and written."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    """The answer of POST /v1/messages."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(TypedDict):
    """The number of tokens that a conversation would start with."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    input_tokens: int


class AnthropicErrorObject(TypedDict):
    """An error; its message begins with the field that is wrong, if it is one."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: str
    message: str


class AnthropicError(TypedDict):
    """The body of answers that refuse a request in Anthropic's protocol."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    type: Literal["error"]
    error: AnthropicErrorObject


BODIES: dict[str, Any] = {
    "ResponsesBody": ResponsesBody,
    "MessagesBody": MessagesBody,
    "CountBody": CountBody,
}
"""Bodies by the names of their schemas."""

ANSWERS: dict[str, Any] = {
    "Response": Response,
    "AnthropicMessage": AnthropicMessage,
    "TokenCount": TokenCount,
    "AnthropicError": AnthropicError,
}
"""Answers by the names of their schemas."""
