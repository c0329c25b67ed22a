"""The OpenAPI document of the HTTP API, made once at start.

Handlers read raw bodies, so FastAPI knows nothing of them. Bodies are described by the models that
read them, options of sampling by their ranges, answers by types of this module, which tests hold
against what a server says. A document cannot say what depends on the model: its vocabulary, its
length, its chat template.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from typing_extensions import TypedDict

from services.common.sampling import (
    MAX_GRAMMAR_LENGTH,
    MAX_LOGPROBS,
    OPTIONS,
    Numbers,
    Option,
    TokenBiases,
    TokenLists,
    WholeNumbers,
)
from services.frontend.http import (
    anthropic_errors,
    conversation_schemas,
    docs_page,
    event_id,
    unknown_fields,
)
from services.frontend.http.openai_request import TOKEN_NAME, ChatBody, CompletionBody
from services.frontend.http.output_format_fields import OutputFormatFields
from services.frontend.http.token_bodies import DetokenizeBody, TokenizeBody
from services.frontend.request.client_call import (
    ID_HEADER,
    MAX_TIMEOUT_S,
    SECONDS,
    TIMEOUT_HEADER,
)
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
)
from services.frontend.request.output_format import MAX_CHOICES

PATH = "/openapi.json"
OPENAPI_VERSION = "3.1.0"
API_VERSION = "1"
"""Version of the HTTP API, as in its paths."""

JSON, EVENTS = "application/json", "text/event-stream"

_EXACT = ConfigDict(extra="forbid")

_FORMAT = (
    "Format of the output. A request has one at most, in one of the fields for it, which becomes a "
    f"grammar of at most {MAX_GRAMMAR_LENGTH} characters that the model must be able to follow."
)


class PromptTokensDetails(TypedDict):
    """Tokens of the prompts by where they came from."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    cached_tokens: int


class Usage(TypedDict):
    """Tokens read and written."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """Log-probabilities of tokens: the prompt's with `echo`, then the answer's. Each object of
    alternatives has the token itself, too; the first token of a prompt has null for both."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TokenLogprob(TypedDict):
    """A token and its log-probability; the bytes are UTF-8, or a part of a character."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, with the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of an answer to a conversation."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """The log-probability of a token in a prompt, and its place in the vocabulary by it."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt as vLLM shows them, by their numbers; null for the first."""


class CompletionChoice(TypedDict):
    """An answer to a text or to tokens, or a piece of one; the tokens come with
    `return_token_ids`, those of the prompt in the first piece only."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """The answers to POST /v1/completions; or a chunk of a stream: its first one has the seed,
    and with `include_usage` the last one has the usage and no choice."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    seed: NotRequired[int]


class CalledFunction(TypedDict):
    """The function that a call names, and its arguments: JSON, as far as the model wrote it."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """A message of the model; the content is null where it only thinks or calls tools."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """An answer to a conversation; its tokens come with `return_token_ids`."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """The answers to POST /v1/chat/completions."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class FunctionDelta(TypedDict):
    """The part of a call's function that a chunk adds."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The part of a call that a chunk adds: the first has its id and its name."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """The part of a message that a chunk adds: first the role, then reasoning, text and calls;
    nothing in a chunk whose tokens make no text yet."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """A piece of an answer to a conversation."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """A chunk of a stream: its first one has the seed, and with `include_usage` the last one has
    the usage and no choice."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    seed: NotRequired[int]


class Model(TypedDict):
    """The model that is served."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """The model that is served, by each of its names."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """The tokens of a prompt; `token_strs` are they as the vocabulary has them, if wanted."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """The text of tokens, with special ones."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    prompt: str


class Version(TypedDict):
    """The version of the server."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    version: str


class ErrorObject(TypedDict):
    """An error: `param` is the field that is wrong, if it is one."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """The body of every answer that refuses a request, and the last event of a stream that
    fails."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    error: ErrorObject


class Status(TypedDict):
    """The answer to a probe."""

    __pydantic_config__ = _EXACT  # type: ignore[misc]

    status: str
    reason: NotRequired[str]


_BODIES: dict[str, Any] = {
    "CompletionBody": CompletionBody,
    "ChatBody": ChatBody,
    "TokenizeBody": TokenizeBody,
    "DetokenizeBody": DetokenizeBody,
    **conversation_schemas.BODIES,
}
"""Bodies by the names of their schemas."""

_ANSWERS: dict[str, Any] = {
    "Completion": Completion,
    "ChatCompletion": ChatCompletion,
    "ChatChunk": ChatChunk,
    "Model": Model,
    "ModelList": ModelList,
    "Tokens": Tokens,
    "Text": Text,
    "Version": Version,
    "Error": Error,
    "Status": Status,
    **conversation_schemas.ANSWERS,
}
"""Answers by the names of their schemas."""

_ERRORS = {
    400: "A field or header is wrong; `param` names it.",
    401: "There is no API key, or nobody has it.",
    404: "There is no such model.",
    408: "The request did not come in time, or took longer than it may.",
    413: "The body is too large.",
    415: "The body is compressed, or has a type that is no JSON.",
    429: "Too much is in the making, or asked for by this API key, at the moment.",
    431: "The request line and its headers are too large.",
    500: "The request failed, or there is a bug; it must not be tried again.",
    503: "There is no pipeline at the moment, or too many clients are connected.",
}

_ANY = (400, 408, 431, 500, 503)
"""Statuses of errors that every request may meet: the server refuses some before they get to an
operation."""


def document(*, needs_key: bool, refuses_unknown: bool = False) -> dict[str, Any]:
    """Returns the document; `needs_key` says whether clients must show an API key, and
    `refuses_unknown` whether bodies have no other fields than those of the document."""
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Orcinus",
            "version": API_VERSION,
            "description": "The OpenAI API of a served language model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": _paths(needs_key=needs_key),
        "components": {
            "schemas": _schemas(refuses_unknown=refuses_unknown),
            "responses": {
                **{_error_name(status): _error(status) for status in _ERRORS},
                **{_anthropic_error_name(status): _anthropic_error(status) for status in _ERRORS},
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _paths(*, needs_key: bool) -> dict[str, Any]:
    security: list[dict[str, list[str]]] = [{"key": []}, {"x_api_key": []}] if needs_key else []
    errors = (*_ANY, 429, *([401] if needs_key else ()))
    models = _operation("listModels", "Lists the model's names.", "ModelList", errors)
    model = _operation("retrieveModel", "Describes the one model.", "Model", (*errors, 404))
    model["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    tokenize = _posted("tokenize", "Makes tokens of a prompt.", "TokenizeBody", "Tokens", errors)
    detokenize = _posted("detokenize", "Makes a text of tokens.", "DetokenizeBody", "Text", errors)
    secured = {
        "/v1/models": {"get": models},
        "/v1/models/{model}": {"get": model},
        "/v1/completions": {"post": _generation("createCompletion", "CompletionBody", errors)},
        "/v1/chat/completions": {"post": _generation("createChatCompletion", "ChatBody", errors)},
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": detokenize},
    }
    secured |= _conversations(errors)
    for operations in secured.values():
        for operation in operations.values():
            operation["security"] = security
    document = _operation("openapi", "Returns this document; needs no key.", None, _ANY)
    docs = _operation("docs", "Returns this document as a page; needs no key.", None, _ANY)
    docs["responses"]["200"]["content"] = {"text/html": {"schema": {"type": "string"}}}
    version = _operation("version", "Tells the server's version; needs no key.", "Version", _ANY)
    return {
        **secured,
        "/health": {"get": _probe("health", "Says that the process is up.")},
        "/ready": {"get": _probe("ready", "Says whether requests would be taken.")},
        "/serving": {"get": _probe("serving", "Says whether requests get tokens, or why not.")},
        "/version": {"get": version},
        PATH: {"get": document},
        docs_page.PATH: {"get": docs},
    }


def _operation(
    name: str, summary: str, answer: str | None, errors: tuple[int, ...]
) -> dict[str, Any]:
    schema = {"type": "object"} if answer is None else _reference("schemas", answer)
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": summary, "content": {JSON: {"schema": schema}}},
            **{str(status): _reference("responses", _error_name(status)) for status in errors},
        },
    }


def _posted(
    name: str, summary: str, body: str, answer: str, errors: tuple[int, ...]
) -> dict[str, Any]:
    operation = _operation(name, summary, answer, (*errors, 404, 413, 415))
    operation["requestBody"] = {
        "required": True,
        "content": {JSON: {"schema": _reference("schemas", body)}},
    }
    operation["responses"]["200"]["headers"] = {
        unknown_fields.HEADER: {
            "description": "Fields of the body that nobody knows, if it had any.",
            "schema": {"type": "string"},
        }
    }
    return operation


def _generation(name: str, body: str, errors: tuple[int, ...]) -> dict[str, Any]:
    answer, chunk = {
        "CompletionBody": ("Completion", "Completion"),
        "ChatBody": ("ChatCompletion", "ChatChunk"),
    }[body]
    operation = _posted(name, "Continues what it is given.", body, answer, errors)
    operation["parameters"] = [
        _header(
            event_id.HEADER, "Id of the last event of a stream that broke; only with `resumption`."
        ),
        _header(ID_HEADER, "The client's name for the request; comes back with the answer."),
        _header(
            TIMEOUT_HEADER,
            f"Seconds that the request may take, waiting included; at most {MAX_TIMEOUT_S}.",
            pattern=SECONDS,
        ),
    ]
    operation["responses"]["200"]["content"][EVENTS] = {
        "schema": {
            "type": "string",
            "description": (
                f"With `stream`. The data of each event is a `{chunk}`, or an `Error` that ends "
                "the stream; the last one of a stream that ends well is `[DONE]`."
            ),
        }
    }
    return operation


def _header(name: str, description: str, **schema: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "description": description,
        "schema": {"type": "string", **schema},
    }


def _conversations(errors: tuple[int, ...]) -> dict[str, Any]:
    """Returns the paths of the protocols that are translations."""
    respond = _conversation("createResponse", "ResponsesBody", "Response", errors)
    message = _conversation("createMessage", "MessagesBody", "AnthropicMessage", errors)
    count = _conversation("countTokens", "CountBody", "TokenCount", errors)
    respond["responses"]["200"]["content"][EVENTS] = _named_events(
        "`response.completed`, `response.incomplete` or `response.failed`, which has the `Response`"
    )
    message["responses"]["200"]["content"][EVENTS] = _named_events(
        "`message_stop`, or `error` with an `AnthropicError`"
    )
    for operation in (message, count):
        for status in operation["responses"].keys() - {"200"}:
            name = _anthropic_error_name(int(status))
            operation["responses"][status] = _reference("responses", name)
    return {
        "/v1/responses": {"post": respond},
        anthropic_errors.PATH: {"post": message},
        anthropic_errors.COUNT_PATH: {"post": count},
    }


def _conversation(name: str, body: str, answer: str, errors: tuple[int, ...]) -> dict[str, Any]:
    summary = "Counts tokens." if body == "CountBody" else "Continues a conversation."
    return _posted(name, summary, body, answer, errors)


def _named_events(last: str) -> dict[str, Any]:
    description = (
        f"With `stream`. Events have a name, which is their `type`, too; the last is {last}."
    )
    return {"schema": {"type": "string", "description": description}}


def _probe(name: str, summary: str) -> dict[str, Any]:
    operation = _operation(name, summary, "Status", _ANY)
    either = [_reference("schemas", "Status"), _reference("schemas", "Error")]
    operation["responses"]["503"] = {
        "description": "It would, or does, not.",
        "content": {JSON: {"schema": {"anyOf": either}}},
    }
    return operation


def _error_name(status: int) -> str:
    return f"Error{status}"


def _error(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {JSON: {"schema": _reference("schemas", "Error")}},
    }
    if status == 429:
        response["headers"] = {
            "Retry-After": {
                "required": True,
                "description": "Seconds until it may be tried again.",
                "schema": {"type": "integer", "minimum": 1},
            }
        }
    if status == 401:
        response["headers"] = {
            "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}
        }
    return response


def _anthropic_error_name(status: int) -> str:
    return f"AnthropicError{status}"


def _anthropic_error(status: int) -> dict[str, Any]:
    """Returns the error of a path of Anthropic's, unless the server refuses the request before it
    knows the path."""
    either = [_reference("schemas", "AnthropicError"), _reference("schemas", "Error")]
    return {**_error(status), "content": {JSON: {"schema": {"anyOf": either}}}}


def _reference(section: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{section}/{name}"}


def _schemas(*, refuses_unknown: bool) -> dict[str, JsonSchemaValue]:
    schemas = _schemas_of(_BODIES)
    if not refuses_unknown:
        for schema in schemas.values():
            if schema.get("additionalProperties") is False:
                del schema["additionalProperties"]
    schemas |= _schemas_of(_ANSWERS)
    for body in ("CompletionBody", "ChatBody", "TokenizeBody"):
        _add_ranges(schemas[body]["properties"])
        _add_formats(schemas[body]["properties"])
    _add_formats(schemas["StructuredOutputs"]["properties"])
    for body in ("ResponsesBody", "MessagesBody"):
        _add_ranges(schemas[body]["properties"])
    schemas.pop("StopTexts", None)  # `stop` has branches of its own
    schemas["CompletionBody"]["properties"]["prompt"] = _prompt()
    schemas["TokenIds"]["items"]["minimum"] = 0
    schemas["Choices"] |= {"minItems": 1, "maxItems": MAX_CHOICES}
    schemas["Choices"]["items"]["minLength"] = 1
    schemas["ResumptionBody"]["properties"]["seed"] |= _bounds(OPTIONS["seed"])
    return schemas


def _schemas_of(types: dict[str, Any]) -> dict[str, JsonSchemaValue]:
    schemas: dict[str, JsonSchemaValue] = {}
    for name, kind in types.items():
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), name: schema}
    return schemas


def _add_ranges(properties: dict[str, JsonSchemaValue]) -> None:
    """Adds the ranges that are checked for all protocols in one place, and not by the models."""
    ranges = {name: _bounds(option) for name, option in OPTIONS.items() if name in properties}
    ranges["n"] = ranges["best_of"] = {"minimum": 1, "maximum": MAX_N}
    # In a conversation `logprobs` is a boolean, and alternatives have a field of their own.
    counts = {"prompt_logprobs", "top_logprobs" if "top_logprobs" in properties else "logprobs"}
    ranges |= {name: {"minimum": 0, "maximum": MAX_LOGPROBS} for name in counts}
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    ranges |= dict.fromkeys(limits, _range(MAX_TOKENS))
    for name, bounds in ranges.items():
        if name in properties:
            first, *_ = properties[name].get("anyOf", [properties[name]])
            first |= bounds
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    texts = {"type": "array", "items": text, "maxItems": MAX_STOPS}
    stops = {"stop": [text, texts, {"type": "null"}], "stop_sequences": [texts, {"type": "null"}]}
    for name in stops.keys() & properties.keys():
        properties[name]["anyOf"] = stops[name]


def _add_formats(properties: dict[str, JsonSchemaValue]) -> None:
    """Adds what is checked of formats where grammars are made of them."""
    for name in properties.keys() & OutputFormatFields.model_fields.keys():
        properties[name]["description"] = _FORMAT
    for name, branch in (
        (name, branch) for name, schema in properties.items() for branch in schema.get("anyOf", ())
    ):
        match name.removeprefix("guided_"), branch.get("type"):
            case "json" | "json_schema", "string":
                branch |= {"contentMediaType": JSON, "pattern": r"^[ \t\r\n]*\{"}
            case "grammar" | "ebnf", "string":
                branch |= {"minLength": 1}


def _bounds(option: Option) -> JsonSchemaValue:
    match option.allowed:
        case TokenLists(max_length):
            return {"maxItems": max_length}
        case TokenBiases(max_length, low, high):
            return {
                "type": "object",
                "propertyNames": {"pattern": TOKEN_NAME},
                "additionalProperties": {"type": "number", "minimum": low, "maximum": high},
                "maxProperties": max_length,
            }
        case Numbers() | WholeNumbers() as allowed:
            return _range(allowed)
        case _:
            return {}


def _range(allowed: Numbers | WholeNumbers) -> JsonSchemaValue:
    match allowed:
        case Numbers(low, high, excludes_low=True):
            return {"exclusiveMinimum": low, "maximum": high}
        case _:
            return {"minimum": allowed.low, "maximum": allowed.high}


def _prompt() -> JsonSchemaValue:
    tokens = {**_reference("schemas", "TokenIds"), "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS}
    text = {"type": "string"}
    return {
        "title": "Prompt",
        "anyOf": [text, {**several, "items": text}, tokens, {**several, "items": tokens}],
    }
