"""The types of the answer of POST /v1/responses."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class OutputText(TypedDict):
    """A text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


@answer_object
class ReasoningText(TypedDict):
    """Reasoning of the model."""

    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


@answer_object
class OutputMessage(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


@answer_object
class OutputReasoning(TypedDict):
    """The reasoning before a message or a call."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


@answer_object
class OutputCall(TypedDict):
    """A call of a function; its arguments are JSON."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


@answer_object
class InputTokensDetails(TypedDict):
    """Tokens that need not be read again, of which there are none yet."""

    cached_tokens: int
    cache_write_tokens: int


@answer_object
class OutputTokensDetails(TypedDict):
    """Tokens of reasoning, which are not counted apart."""

    reasoning_tokens: int


@answer_object
class ResponseUsage(TypedDict):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@answer_object
class ResponseError(TypedDict):
    """The reason why a response failed."""

    code: str
    message: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class RequestEcho(TypedDict):
    """The fields of an answer that repeat the request."""

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


@answer_object
class Response(RequestEcho):
    """The answer of POST /v1/responses; nothing is stored. The last fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
