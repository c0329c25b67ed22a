"""The answers of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.openai.answer import PromptLogprobs, Usage
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.request.finish_reason import FinishReason


@answer_object
class TokenLogprob(TypedDict):
    """A token and its log-probability; the bytes are UTF-8, or a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


@answer_object
class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, with the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


@answer_object
class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of an answer to a conversation."""

    content: list[ChatTokenLogprob]
    refusal: None


@answer_object
class CalledFunction(TypedDict):
    """The function that a call names, and its arguments: JSON, as far as the model wrote it."""

    name: str
    arguments: str


@answer_object
class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


@answer_object
class AssistantMessage(TypedDict):
    """A message of the model; the content is null where it only thinks or calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@answer_object
class ChatChoice(TypedDict):
    """An answer to a conversation; its tokens come with `return_token_ids`."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: NotRequired[Sequence[int]]


@answer_object
class ChatCompletion(TypedDict):
    """The answers to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[Sequence[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@answer_object
class FunctionDelta(TypedDict):
    """The part of a call's function that a chunk adds."""

    name: NotRequired[str]
    arguments: str


@answer_object
class ToolCallDelta(TypedDict):
    """The part of a call that a chunk adds: the first has its id and its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@answer_object
class Delta(TypedDict):
    """The part of a message that a chunk adds: first the role, then reasoning, text and calls;
    nothing in a chunk whose tokens make no text yet."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


@answer_object
class ChatChunkChoice(TypedDict):
    """A piece of an answer to a conversation."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    token_ids: NotRequired[Sequence[int]]


@answer_object
class ChatChunk(TypedDict):
    """A chunk of a stream: its first one has the seed, and with `include_usage` the last one has
    the usage and no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    seed: NotRequired[int]
