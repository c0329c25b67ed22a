"""Types of the answers to completions and to chats, both whole and as chunks of a stream."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.orcinus_note import OrcinusNote
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob
from services.frontend.request.finish_reason import FinishReason


@answer_object
class PromptTokensDetails(TypedDict):
    """Details of the number of tokens of the prompts: how many came from a cache."""

    cached_tokens: int
    """Number of tokens of the prompts that were taken from a cache instead of being computed."""


@answer_object
class Usage(TypedDict):
    """Numbers of tokens of the prompts and of the answers."""

    prompt_tokens: int
    """Number of tokens of all prompts."""
    prompt_tokens_details: PromptTokensDetails
    """Details of the number of tokens of the prompts: how many came from a cache."""
    completion_tokens: int
    """Number of generated tokens, over all answers."""
    total_tokens: int
    """Sum of `prompt_tokens` and `completion_tokens`."""


@answer_object
class PromptLogprob(TypedDict):
    """The log-probability of a token in a prompt, and the rank of the token in the vocabulary."""

    logprob: float
    """Log-probability of the token."""
    rank: int
    """Rank of the token in the vocabulary by log-probability. The most likely token has rank 1."""
    decoded_token: str
    """Text of the token."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Type of a prompt's log-probabilities in vLLM's form: a list with one item for each token of the
prompt. The item is an object keyed by token id, or null for the first token."""


class Envelope(TypedDict):
    """The fields at the beginning of each answer and of each chunk."""

    id: str
    object: Any
    created: int
    model: str


@answer_object
class CompletionLogprobs(TypedDict):
    """Log-probabilities of the tokens of an answer; with `echo` the tokens of the prompt come
    first. Each object in `top_logprobs` also contains the token itself. The first token of a prompt
    has null in place of a log-probability and of an object."""

    text_offset: list[int]
    """Position in the text at which each token begins, in characters."""
    token_logprobs: list[float | None]
    """Log-probability of each token; null for the first token of a prompt."""
    tokens: list[str]
    """Text of each token."""
    top_logprobs: list[dict[str, float] | None]
    """Log-probabilities of the most likely tokens and of the token itself, keyed by the text of the
    token; null for the first token of a prompt."""


@answer_object
class CompletionChoice(TypedDict):
    """An answer to a prompt of text or of tokens, or a piece of such an answer. With
    `return_token_ids` the tokens of the answer are included, and the first piece has the tokens of
    the prompt."""

    index: int
    """Index of the answer among all answers. The `n` answers to the first prompt come first."""
    text: str
    """Text of the answer or of the piece, without the stop text that ended the answer; with `echo`
    the text begins with the prompt."""
    logprobs: CompletionLogprobs | None
    """Log-probabilities if the request has `logprobs`, else null."""
    finish_reason: FinishReason | None
    """`stop` or `length`; null while the answer goes on."""
    token_ids: NotRequired[Sequence[int]]
    """Tokens of the answer. Present only with `return_token_ids`."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """Tokens of the prompt. Present only with `return_token_ids`, in the first chunk of an answer
    or in a whole answer."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Log-probabilities of the prompt: for each token an object of `PromptLogprob` keyed by token
    id, and null for the first token. Present only with `prompt_logprobs`."""
    receipt: NotRequired[dict[str, Any]]
    """Receipt of the answer (`docs/receipts.md`). Present only with `receipt`, once the answer has
    ended."""


@answer_object
class Completion(TypedDict):
    """The answers to POST /v1/completions, or a chunk of a stream. The first chunk has the seed.
    With `include_usage` the last chunk has the usage and no choices."""

    id: str
    """Id of the completion: `cmpl-` and the id of the request."""
    object: Literal["text_completion"]
    """Always `text_completion`."""
    created: int
    """Time at which the request arrived, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[CompletionChoice]
    """The answers, or pieces of answers."""
    usage: NotRequired[Usage | None]
    """Numbers of tokens of the prompts and of the answers."""
    seed: NotRequired[int]
    """Seed of the request: the client's seed, or a random one that the server chose. In a stream,
    only the first chunk has the seed."""
    orcinus: NotRequired[OrcinusNote]
    """Whether the JSON in the answer matches its schemas, and the keywords of the schemas that are
    not enforced. Present only if there is such a keyword. In a stream, the chunk that ends an
    answer has this field."""


@answer_object
class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of an answer to a conversation."""

    content: list[ChatTokenLogprob]
    """Log-probabilities of the tokens of the content, in the order of the tokens. With
    `return_token_ids`, also of the tokens of reasoning, of calls and of a stop text."""
    refusal: None
    """Always null."""


@answer_object
class CalledFunction(TypedDict):
    """The name of a called function, and the arguments of the call."""

    name: str
    """Name of the function."""
    arguments: str
    """Arguments as a JSON text. The text is incomplete if the answer ended early."""


@answer_object
class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    """Id of the call. A later message with the call's result repeats the id."""
    type: Literal["function"]
    """Always `function`."""
    function: CalledFunction
    """The called function and the arguments."""


@answer_object
class AssistantMessage(TypedDict):
    """A message of the model."""

    role: Literal["assistant"]
    """Always `assistant`."""
    content: str | None
    """Text of the message; null if the model only reasons or calls tools."""
    refusal: None
    """Always null."""
    reasoning_content: NotRequired[str]
    """Reasoning of the model before the text."""
    tool_calls: NotRequired[list[ToolCall]]
    """Calls of tools by the model."""


@answer_object
class ChatChoice(TypedDict):
    """An answer to a conversation."""

    index: int
    """Index of the answer among the `n` answers."""
    message: AssistantMessage
    """The answer."""
    logprobs: ChatLogprobs | None
    """Log-probabilities if the request has `logprobs`, else null."""
    finish_reason: FinishReason | Literal["tool_calls"]
    """`stop`, `length` or `tool_calls`."""
    token_ids: NotRequired[Sequence[int]]
    """Tokens of the answer. Present only with `return_token_ids`."""
    receipt: NotRequired[dict[str, Any]]
    """Receipt of the answer (`docs/receipts.md`). Present only with `receipt`."""


@answer_object
class ChatCompletion(TypedDict):
    """The answers to POST /v1/chat/completions."""

    id: str
    """Id of the answers: `chatcmpl-` and the id of the request."""
    object: Literal["chat.completion"]
    """Always `chat.completion`."""
    created: int
    """Time at which the request arrived, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[ChatChoice]
    """The answers."""
    usage: Usage
    """Numbers of tokens of the prompts and of the answers."""
    prompt_token_ids: NotRequired[Sequence[int]]
    """Tokens of the conversation. Present only with `return_token_ids`."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Log-probabilities of the prompt: for each token an object of `PromptLogprob` keyed by token
    id, and null for the first token. Present only with `prompt_logprobs`."""
    orcinus: NotRequired[OrcinusNote]
    """Whether the JSON in the answer matches its schemas, and the keywords of the schemas that are
    not enforced. Present only if there is such a keyword."""


@answer_object
class FunctionDelta(TypedDict):
    """A part of a tool call's function in one chunk of a stream: the name of the function, or
    further characters of its arguments."""

    name: NotRequired[str]
    """Name of the function. Present only in the first piece of a call."""
    arguments: str
    """New characters of the arguments."""


@answer_object
class ToolCallDelta(TypedDict):
    """A part of a tool call in one chunk of a stream. The first part of a call has the id of the
    call and the name of the function."""

    index: int
    """Index of the call among the calls of the answer."""
    id: NotRequired[str]
    """Id of the call. Present only in the first piece of a call."""
    type: NotRequired[Literal["function"]]
    """Always `function`. Present only in the first piece of a call."""
    function: FunctionDelta
    """New parts of the function's name and arguments."""


@answer_object
class Delta(TypedDict):
    """The part of the assistant's message in one chunk of a stream: first the role, then reasoning,
    text and tool calls. The part is empty if the tokens of the chunk make no text yet."""

    role: NotRequired[Literal["assistant"]]
    """Always `assistant`. Present only in the first chunk of an answer."""
    content: NotRequired[str | None]
    """New text. The value is null where a call begins, and at the beginning of an answer that must
    be a call."""
    refusal: NotRequired[None]
    """Always null. Present only in the first chunk of an answer."""
    reasoning_content: NotRequired[str]
    """New text of the reasoning."""
    tool_calls: NotRequired[list[ToolCallDelta]]
    """New calls, and new pieces of calls."""


@answer_object
class ChatChunkChoice(TypedDict):
    """A piece of an answer to a conversation."""

    index: int
    """Index of the answer among the `n` answers."""
    delta: Delta
    """The part of the message in this chunk."""
    logprobs: ChatLogprobs | None
    """Log-probabilities of the new tokens if the request has `logprobs`, else null."""
    finish_reason: FinishReason | Literal["tool_calls"] | None
    """`stop`, `length` or `tool_calls`; null while the answer goes on."""
    token_ids: NotRequired[Sequence[int]]
    """New tokens. Present only with `return_token_ids`."""
    receipt: NotRequired[dict[str, Any]]
    """Receipt of the answer (`docs/receipts.md`). Present only with `receipt`, in the chunk that
    ends the answer."""


@answer_object
class ChatChunk(TypedDict):
    """A chunk of a stream. The first chunk has the seed. With `include_usage` the last chunk has
    the usage and no choices."""

    id: str
    """Id of the answers: `chatcmpl-` and the id of the request."""
    object: Literal["chat.completion.chunk"]
    """Always `chat.completion.chunk`."""
    created: int
    """Time at which the request arrived, in seconds since 1970."""
    model: str
    """Name of the model."""
    choices: list[ChatChunkChoice]
    """A piece of an answer, in a list of one. The list is empty in the chunk with the usage."""
    usage: NotRequired[Usage | None]
    """Numbers of tokens of the prompts and of the answers, with `include_usage`. Only the last
    chunk has the numbers, and other chunks have null, unless `continuous_usage_stats` is true."""
    seed: NotRequired[int]
    """Seed of the request: the client's seed, or a random one that the server chose. Present only
    in the first chunk."""
    orcinus: NotRequired[OrcinusNote]
    """Whether the JSON in the answer matches its schemas, and the keywords of the schemas that are
    not enforced. Present only if there is such a keyword. Only the chunk that ends an answer has
    this field."""
