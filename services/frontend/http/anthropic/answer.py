"""The types of the answers in Anthropic's protocol."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class AnthropicText(TypedDict):
    """A text of the model."""

    type: Literal["text"]
    """`text`."""
    text: str
    """What the assistant says."""


@answer_object
class AnthropicThinking(TypedDict):
    """Reasoning of the model. The server does not check the signature that comes back."""

    type: Literal["thinking"]
    """`thinking`."""
    thinking: str
    """What the assistant thinks."""
    signature: str
    """The request's name; the server does not check it."""


@answer_object
class AnthropicToolUse(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    """`tool_use`."""
    id: str
    """Id of the call, which its result names."""
    name: str
    """Name of the tool."""
    input: dict[str, Any]
    """Arguments; of a call that was cut short, what there is."""


@answer_object
class AnthropicUsage(TypedDict):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    """Tokens of the prompt without `cache_read_input_tokens`."""
    cache_creation_input_tokens: int
    """Always 0."""
    cache_read_input_tokens: int
    """Tokens of the prompt that were not computed, since a cache had them."""
    output_tokens: int
    """Tokens generated."""


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@answer_object
class AnthropicMessage(TypedDict):
    """The answer of POST /v1/messages."""

    id: str
    """`msg_` and the request's name."""
    type: Literal["message"]
    """`message`."""
    role: Literal["assistant"]
    """`assistant`."""
    model: str
    """Name of the model."""
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    """What the model wrote: thoughts, texts and calls, in their order."""
    stop_reason: StopReason | None
    """`end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; null while it goes on."""
    stop_sequence: str | None
    """The stop text that was met, or null."""
    usage: AnthropicUsage
    """Tokens read and written."""
