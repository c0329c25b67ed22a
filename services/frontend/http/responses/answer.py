"""The types of the answer of POST /v1/responses."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class OutputText(TypedDict):
    """A text of the model."""

    type: Literal["output_text"]
    """`output_text`."""
    text: str
    """What the assistant says."""
    annotations: list[Any]
    """Always empty."""
    logprobs: list[Any]
    """Always empty."""


@answer_object
class ReasoningText(TypedDict):
    """Reasoning of the model."""

    type: Literal["reasoning_text"]
    """`reasoning_text`."""
    text: str
    """What the assistant thinks."""


Status = Literal["in_progress", "completed", "incomplete"]


@answer_object
class OutputMessage(TypedDict):
    """A message of the model."""

    id: str
    """`msg_`, the request's name and the item's place."""
    type: Literal["message"]
    """`message`."""
    role: Literal["assistant"]
    """`assistant`."""
    status: Status
    """`in_progress`, `completed` or `incomplete`."""
    content: list[OutputText]
    """The text, one part."""


@answer_object
class OutputReasoning(TypedDict):
    """The reasoning before a message or a call."""

    id: str
    """`rs_`, the request's name and the item's place."""
    type: Literal["reasoning"]
    """`reasoning`."""
    status: Status
    """`in_progress`, `completed` or `incomplete`."""
    summary: list[Any]
    """Always empty."""
    content: list[ReasoningText]
    """The reasoning, one part."""


@answer_object
class OutputCall(TypedDict):
    """A call of a function; its arguments are JSON."""

    id: str
    """`fc_`, the request's name and the item's place."""
    type: Literal["function_call"]
    """`function_call`."""
    status: Status
    """`in_progress`, `completed` or `incomplete`."""
    call_id: str
    """Id of the call, which its result names."""
    name: str
    """Name of the function."""
    arguments: str
    """Arguments, as JSON text, as far as the model wrote it."""


@answer_object
class InputTokensDetails(TypedDict):
    """Tokens of the prompt by where they came from."""

    cached_tokens: int
    """Tokens of the prompt that were not computed, since a cache had them."""
    cache_write_tokens: int
    """Always 0."""


@answer_object
class OutputTokensDetails(TypedDict):
    """Tokens of reasoning, which are not counted apart."""

    reasoning_tokens: int
    """Always 0: they are not counted apart."""


@answer_object
class ResponseUsage(TypedDict):
    """Tokens read and written."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputTokensDetails
    """Some of them by where they came from."""
    output_tokens: int
    """Tokens generated."""
    output_tokens_details: OutputTokensDetails
    """Some of them by what they are."""
    total_tokens: int
    """Both together."""


@answer_object
class ResponseError(TypedDict):
    """The reason why a response failed."""

    code: str
    """`rate_limit_exceeded` or `server_error`."""
    message: str
    """What is wrong, in words."""


OutputItem = OutputMessage | OutputReasoning | OutputCall


class RequestEcho(TypedDict):
    """The fields of an answer that repeat the request."""

    instructions: str | None
    """As in the request."""
    max_output_tokens: int | None
    """As in the request."""
    metadata: dict[str, str]
    """As in the request."""
    parallel_tool_calls: bool
    """As in the request, or its default."""
    reasoning: dict[str, Any]
    """`effort` as in the request, and `summary`, which is null."""
    temperature: float
    """Temperature that was used."""
    text: dict[str, Any]
    """Format of the text, as in the request."""
    tool_choice: str | dict[str, Any]
    """As in the request, or `auto`."""
    tools: list[dict[str, Any]]
    """Functions of the request."""
    top_p: float
    """`top_p` that was used."""


@answer_object
class Response(RequestEcho):
    """The answer of POST /v1/responses; nothing is stored. The last fields repeat the request."""

    id: str
    """`resp_` and the request's name."""
    object: Literal["response"]
    """`response`."""
    created_at: int
    """When the request came, in seconds since 1970."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """`completed`, `incomplete` where a limit of tokens ended it, and in streams `in_progress` or
    `failed`."""
    model: str
    """Name of the model."""
    output: list[OutputItem]
    """What the model wrote: reasoning, messages and calls, in their order."""
    usage: ResponseUsage | None
    """Tokens read and written; null until the end."""
    error: ResponseError | None
    """Why it failed, or null."""
    incomplete_details: dict[str, str] | None
    """`{"reason": "max_output_tokens"}` where it is incomplete, or null."""
    store: Literal[False]
    """Always false."""
    background: Literal[False]
    """Always false."""
    previous_response_id: None
    """Always null."""
    truncation: Literal["disabled"]
    """Always `disabled`."""
