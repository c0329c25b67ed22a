"""The types of the answers of completions and of chats, whole and as chunks of a stream."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.request.finish_reason import FinishReason


@answer_object
class PromptTokensDetails(TypedDict):
    """Tokens of the prompts by where they came from."""

    cached_tokens: int
    """Tokens of the prompts that were not computed, since a cache had them."""


@answer_object
class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    """Tokens of all prompts."""
    prompt_tokens_details: PromptTokensDetails
    """Some of them by where they came from."""
    completion_tokens: int
    """Tokens generated, over all answers."""
    total_tokens: int
    """Both together."""


@answer_object
class PromptLogprob(TypedDict):
    """The log-probability of a token in a prompt, and the rank of the token in the vocabulary."""

    logprob: float
    """Log-probability of the token."""
    rank: int
    """Rank of the token in the vocabulary by log-probability, from 1."""
    decoded_token: str
    """Text of the token."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt as vLLM shows them, by their numbers; null for the first."""


class Envelope(TypedDict):
    """The fields with which each answer and each chunk begins."""

    id: str
    object: Any
    created: int
    model: str


@answer_object
class CompletionLogprobs(TypedDict):
    """Log-probabilities of tokens: the prompt's with `echo`, then the answer's. Each object of
    alternatives has the token itself, too. The first token of a prompt has null as its
    log-probability and as its alternatives."""

    text_offset: list[int]
    """Where in the text each token begins, in characters."""
    token_logprobs: list[float | None]
    """Log-probability of each token; null for the first token of a prompt."""
    tokens: list[str]
    """Text of each token."""
    top_logprobs: list[dict[str, float] | None]
    """Log-probabilities of the most likely tokens and of the token itself, by their texts; null for
    the first token of a prompt."""


@answer_object
class CompletionChoice(TypedDict):
    """An answer to a text or to tokens, or a piece of one. The tokens of the answer come with
    `return_token_ids`; the tokens of the prompt come in the first piece only."""

    index: int
    """Which of the answers: `n` to the first prompt come first."""
    text: str
    """Text, without what ended it; with `echo` it begins with the prompt."""
    logprobs: CompletionLogprobs | None
    """Log-probabilities, with `logprobs`; else null."""
    finish_reason: FinishReason | None
    """`stop` or `length`; null while it goes on."""
    token_ids: NotRequired[Sequence[int]]
    """Tokens; with `return_token_ids`."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """Tokens of the prompt; with `return_token_ids`, in an answer's first chunk."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Log-probabilities of the prompt's tokens, with `prompt_logprobs`: for each token an object
    with a `PromptLogprob` by the number of each token shown, and null for the first."""


@answer_object
class Completion(TypedDict):
    """The answers to POST /v1/completions, or a chunk of a stream. The first chunk has the seed.
    With `include_usage` the last chunk has the usage and no choice."""

    id: str
    """`cmpl-` and the request's name."""
    object: Literal["text_completion"]
    """`text_completion`."""
    created: int
    """When the request came, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[CompletionChoice]
    """The answers, or pieces of them."""
    usage: NotRequired[Usage | None]
    """Tokens read and written."""
    seed: NotRequired[int]
    """Seed, given or drawn; in a stream's first chunk."""


@answer_object
class TokenLogprob(TypedDict):
    """A token and its log-probability; the bytes are UTF-8, or a part of a character."""

    token: str
    """Text of the token."""
    logprob: float
    """Its log-probability."""
    bytes: list[int]
    """Bytes of its text, in UTF-8 unless it is a part of a character."""


@answer_object
class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]
    """The most likely tokens at this position, most likely first."""


@answer_object
class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of an answer to a conversation."""

    content: list[ChatTokenLogprob]
    """The tokens, in their order."""
    refusal: None
    """Always null."""


@answer_object
class CalledFunction(TypedDict):
    """The function that a call names, and its arguments: JSON, as far as the model wrote it."""

    name: str
    """Name of the function."""
    arguments: str
    """Arguments, as JSON text, as far as the model wrote it."""


@answer_object
class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    """Id of the call, which its result names."""
    type: Literal["function"]
    """`function`."""
    function: CalledFunction
    """What is called."""


@answer_object
class AssistantMessage(TypedDict):
    """A message of the model; the content is null where it only thinks or calls tools."""

    role: Literal["assistant"]
    """`assistant`."""
    content: str | None
    """What it says; null where it only thinks or calls tools."""
    refusal: None
    """Always null."""
    reasoning_content: NotRequired[str]
    """What it thinks before it speaks."""
    tool_calls: NotRequired[list[ToolCall]]
    """Its calls of tools."""


@answer_object
class ChatChoice(TypedDict):
    """An answer to a conversation; its tokens come with `return_token_ids`."""

    index: int
    """Which of the `n` answers."""
    message: AssistantMessage
    """The answer."""
    logprobs: ChatLogprobs | None
    """Log-probabilities, with `logprobs`; else null."""
    finish_reason: FinishReason | Literal["tool_calls"]
    """`stop`, `length` or `tool_calls`."""
    token_ids: NotRequired[Sequence[int]]
    """Tokens; with `return_token_ids`."""


@answer_object
class ChatCompletion(TypedDict):
    """The answers to POST /v1/chat/completions."""

    id: str
    """`chatcmpl-` and the request's name."""
    object: Literal["chat.completion"]
    """`chat.completion`."""
    created: int
    """When the request came, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[ChatChoice]
    """The answers."""
    usage: Usage
    """Tokens read and written."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """Tokens of the conversation; with `return_token_ids`."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Log-probabilities of the prompt's tokens, with `prompt_logprobs`: for each token an object
    with a `PromptLogprob` by the number of each token shown, and null for the first."""


@answer_object
class FunctionDelta(TypedDict):
    """The part of a call's function that a chunk adds."""

    name: NotRequired[str]
    """Name of the function; in the call's first piece."""
    arguments: str
    """New characters of the arguments."""


@answer_object
class ToolCallDelta(TypedDict):
    """The part of a call that a chunk adds: the first has its id and its name."""

    index: int
    """Which of the answer's calls it is."""
    id: NotRequired[str]
    """Id of the call; in its first piece."""
    type: NotRequired[Literal["function"]]
    """`function`; in its first piece."""
    function: FunctionDelta
    """What is new of the function."""


@answer_object
class Delta(TypedDict):
    """The part of a message that a chunk adds: first the role, then reasoning, text and calls;
    nothing in a chunk whose tokens make no text yet."""

    role: NotRequired[Literal["assistant"]]
    """`assistant`; in an answer's first chunk."""
    content: NotRequired[str]
    """New text."""
    refusal: NotRequired[None]
    """Null; in an answer's first chunk."""
    reasoning_content: NotRequired[str]
    """New reasoning."""
    tool_calls: NotRequired[list[ToolCallDelta]]
    """New calls, and new pieces of calls."""


@answer_object
class ChatChunkChoice(TypedDict):
    """A piece of an answer to a conversation."""

    index: int
    """Which of the `n` answers."""
    delta: Delta
    """What is new."""
    logprobs: ChatLogprobs | None
    """Log-probabilities of new tokens, with `logprobs`; else null."""
    finish_reason: FinishReason | Literal["tool_calls"] | None
    """`stop`, `length` or `tool_calls`; null while it goes on."""
    token_ids: NotRequired[Sequence[int]]
    """New tokens; with `return_token_ids`."""


@answer_object
class ChatChunk(TypedDict):
    """A chunk of a stream. The first chunk has the seed. With `include_usage` the last chunk has
    the usage and no choice."""

    id: str
    """`chatcmpl-` and the request's name."""
    object: Literal["chat.completion.chunk"]
    """`chat.completion.chunk`."""
    created: int
    """When the request came, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[ChatChunkChoice]
    """A piece of an answer."""
    usage: NotRequired[Usage | None]
    """Tokens read and written, with `include_usage`; null but in the last chunk, unless
    `continuous_usage_stats` is true."""
    seed: NotRequired[int]
    """Seed, given or drawn; in the first chunk."""
