"""The types of the answer of POST /v1/responses."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.orcinus_note import OrcinusNote
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob


@answer_object
class OutputText(TypedDict):
    """A text of the model, which is the only part of a message."""

    type: Literal["output_text"]
    """Always `output_text`."""
    text: str
    """Text of the assistant."""
    annotations: list[Any]
    """Always empty."""
    logprobs: list[ChatTokenLogprob]
    """Log-probabilities of the tokens of the text; empty unless `include` or `top_logprobs` asks
    for them."""


@answer_object
class ReasoningText(TypedDict):
    """The text of the model's reasoning."""

    type: Literal["reasoning_text"]
    """Always `reasoning_text`."""
    text: str
    """Reasoning of the assistant."""


Status = Literal["in_progress", "completed", "incomplete"]


@answer_object
class OutputMessage(TypedDict):
    """A message of the model."""

    id: str
    """Id of the message: `msg_`, the id of the request, and the index of the item."""
    type: Literal["message"]
    """Always `message`."""
    role: Literal["assistant"]
    """Always `assistant`."""
    status: Status
    """State of the message: `in_progress`, `completed` or `incomplete`."""
    content: list[OutputText]
    """The text of the message, in a list with one part."""


@answer_object
class OutputReasoning(TypedDict):
    """Reasoning of the model before a message or a call."""

    id: str
    """Id of the reasoning: `rs_`, the id of the request, and the index of the item."""
    type: Literal["reasoning"]
    """Always `reasoning`."""
    status: Status
    """State of the reasoning: `in_progress`, `completed` or `incomplete`."""
    summary: list[Any]
    """Always empty."""
    content: list[ReasoningText]
    """The text of the reasoning, in a list with one part."""
    encrypted_content: NotRequired[str | None]
    """The reasoning in a form that clients send back. The value is the reasoning in Base64, which
    is not encrypted. It is null until the item is complete. Present only if `include` has
    `reasoning.encrypted_content`."""


@answer_object
class OutputCall(TypedDict):
    """A call of a function by the model."""

    id: str
    """Id of the item: `fc_`, the id of the request, and the index of the item."""
    type: Literal["function_call"]
    """Always `function_call`."""
    status: Status
    """State of the call: `in_progress`, `completed` or `incomplete`."""
    call_id: str
    """Id of the call. A later item with the call's result repeats the id."""
    name: str
    """Name of the function."""
    namespace: NotRequired[str]
    """Namespace of the function; left out for a function without a namespace."""
    arguments: str
    """Arguments as a JSON text. The text is incomplete if the answer ended early."""


@answer_object
class OutputCustomCall(TypedDict):
    """A call of a custom tool by the model."""

    id: str
    """Id of the item: `ctc_`, the id of the request, and the index of the item."""
    type: Literal["custom_tool_call"]
    """Always `custom_tool_call`."""
    status: Status
    """State of the call: `in_progress`, `completed` or `incomplete`."""
    call_id: str
    """Id of the call. A later item with the call's result repeats the id."""
    name: str
    """Name of the tool."""
    namespace: NotRequired[str]
    """Namespace of the tool; left out for a tool without a namespace."""
    input: str
    """Input of the tool. The input is incomplete if the answer ended early."""


@answer_object
class OutputSearchCall(TypedDict):
    """A call of the search for tools by the model. The client runs the search."""

    id: str
    """Id of the item: `tsc_`, the id of the request, and the index of the item."""
    type: Literal["tool_search_call"]
    """Always `tool_search_call`."""
    status: Status
    """State of the call: `in_progress`, `completed` or `incomplete`."""
    call_id: str
    """Id of the call. A later item with the call's result repeats the id."""
    execution: Literal["client"]
    """Always `client`: the client runs the search."""
    arguments: Any
    """Arguments of the search as an object. If the model wrote a text that is not JSON, the value
    is that text."""


@answer_object
class InputTokensDetails(TypedDict):
    """Details of the number of tokens of the prompt: how many came from a cache."""

    cached_tokens: int
    """Number of tokens of the prompt that were taken from a cache instead of being computed."""
    cache_write_tokens: int
    """Always 0."""


@answer_object
class OutputTokensDetails(TypedDict):
    """Numbers of tokens of the output, by kind. Tokens of reasoning are not counted separately."""

    reasoning_tokens: int
    """Always 0: tokens of reasoning are not counted separately."""


@answer_object
class ResponseUsage(TypedDict):
    """Numbers of tokens of the prompt and of the output."""

    input_tokens: int
    """Number of tokens of the prompt."""
    input_tokens_details: InputTokensDetails
    """Details of the number of tokens of the prompt: how many came from a cache."""
    output_tokens: int
    """Number of generated tokens."""
    output_tokens_details: OutputTokensDetails
    """Details of the number of generated tokens."""
    total_tokens: int
    """Sum of `input_tokens` and `output_tokens`."""


@answer_object
class ResponseError(TypedDict):
    """The reason why a response failed."""

    code: str
    """Code of the error: `rate_limit_exceeded` or `server_error`."""
    message: str
    """Description of the error."""


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputSearchCall


class RequestEcho(TypedDict):
    """The fields of an answer that repeat the request."""

    instructions: str | None
    """Value of `instructions` in the request."""
    max_output_tokens: int | None
    """Value of `max_output_tokens` in the request."""
    metadata: dict[str, str]
    """Value of `metadata` in the request."""
    parallel_tool_calls: bool
    """Value of `parallel_tool_calls` in the request, or the default."""
    reasoning: dict[str, Any]
    """An object with `effort`, as in the request, and `summary`, which is null."""
    temperature: float
    """Temperature that was used."""
    text: dict[str, Any]
    """An object with `format`, the format of the text as in the request."""
    tool_choice: str | dict[str, Any]
    """Value of `tool_choice` in the request, or `auto`."""
    tools: list[dict[str, Any]]
    """Tools that the model sees, from the request's `tools`."""
    top_p: float
    """`top_p` that was used."""


@answer_object
class Response(RequestEcho):
    """The answer of POST /v1/responses. The last fields of the object repeat the request. The
    server does not store answers."""

    id: str
    """Id of the response: `resp_` and the id of the request."""
    object: Literal["response"]
    """Always `response`."""
    created_at: int
    """Time at which the request arrived, in seconds since 1970."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """State of the response: `completed`, or `incomplete` if a limit on tokens ended the output. In
    a stream the state can also be `in_progress` or `failed`."""
    model: str
    """Name of the model."""
    output: list[OutputItem]
    """Output of the model: reasoning, messages and calls, in the order of generation."""
    usage: ResponseUsage | None
    """Numbers of tokens of the prompt and of the output; null until the answer ends."""
    error: ResponseError | None
    """Reason why the response failed, or null."""
    incomplete_details: dict[str, str] | None
    """`{"reason": "max_output_tokens"}` if the response is incomplete, else null."""
    store: Literal[False]
    """Always false."""
    background: Literal[False]
    """Always false."""
    previous_response_id: None
    """Always null."""
    truncation: Literal["disabled"]
    """Always `disabled`."""
    orcinus: NotRequired[OrcinusNote]
    """Whether the JSON in the answer matches its schemas, and the names of what is not enforced:
    keywords of the schemas, and grammars of custom tools. Present only if there is such a keyword
    or grammar."""
    receipt: NotRequired[dict[str, Any]]
    """Receipt of the answer (`docs/receipts.md`). Present only with `receipt`, once the answer has
    ended."""
