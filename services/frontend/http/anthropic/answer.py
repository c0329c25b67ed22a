"""The types of the answers in Anthropic's protocol."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.orcinus_note import OrcinusNote


@answer_object
class AnthropicText(TypedDict):
    """A block of text that the model generated."""

    type: Literal["text"]
    """Always `text`."""
    text: str
    """Text of the assistant."""


@answer_object
class AnthropicThinking(TypedDict):
    """Reasoning of the model, with a signature. Clients send the signature back, and the server
    does not check it."""

    type: Literal["thinking"]
    """Always `thinking`."""
    thinking: str
    """Reasoning of the assistant."""
    signature: str
    """Id of the request. The server does not check the signature that a client sends back."""


@answer_object
class AnthropicToolUse(TypedDict):
    """A call of a tool by the model."""

    type: Literal["tool_use"]
    """Always `tool_use`."""
    id: str
    """Id of the call. A later block with the call's result repeats the id."""
    name: str
    """Name of the tool."""
    input: dict[str, Any]
    """Arguments of the call. If the answer ended within the call, these are only the arguments that
    were complete."""


@answer_object
class AnthropicUsage(TypedDict):
    """Numbers of tokens of the prompt and of the answer."""

    input_tokens: int
    """Number of tokens of the prompt, without the tokens of `cache_read_input_tokens`."""
    cache_creation_input_tokens: int
    """Always 0."""
    cache_read_input_tokens: int
    """Number of tokens of the prompt that were taken from a cache instead of being computed."""
    output_tokens: int
    """Number of generated tokens."""


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@answer_object
class AnthropicMessage(TypedDict):
    """The answer of POST /v1/messages."""

    id: str
    """Id of the message: `msg_` and the id of the request."""
    type: Literal["message"]
    """Always `message`."""
    role: Literal["assistant"]
    """Always `assistant`."""
    model: str
    """Name of the model."""
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    """Output of the model: reasoning, texts and calls, in the order of generation."""
    stop_reason: StopReason | None
    """`end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; null while the answer goes on."""
    stop_sequence: str | None
    """The stop text that ended the answer, or null."""
    usage: AnthropicUsage
    """Numbers of tokens of the prompt and of the answer."""
    orcinus: NotRequired[OrcinusNote]
    """Whether the JSON in the answer matches its schemas, and the keywords of the schemas that are
    not enforced. Present only if there is such a keyword. In a stream the event `message_delta` has
    this field."""
    receipt: NotRequired[dict[str, Any]]
    """Receipt of the answer (`docs/receipts.md`). Present only with `receipt`. In a stream the
    event `message_delta` has this field."""
