"""The OpenAPI document of the HTTP API, made once at start.

Bodies are described by the models that read them, options of sampling by their ranges
(`field_ranges`), answers by typed dictionaries (`*_schemas`), which tests hold against what a
server says. A document cannot say what depends on the model: its vocabulary, its length, its chat
template.
"""

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from services.frontend.http.anthropic import errors as anthropic_errors
from services.frontend.http.anthropic.answer import AnthropicError, AnthropicMessage, TokenCount
from services.frontend.http.anthropic.request import CountBody, MessagesBody
from services.frontend.http.docs import operation as operations
from services.frontend.http.docs import page as docs_page
from services.frontend.http.docs.components import BY_SERVER, SECURITY_SCHEMES, error_responses
from services.frontend.http.docs.field_ranges import Schemas, add_ranges
from services.frontend.http.openai.answer import (
    Error,
    Model,
    ModelList,
    Status,
    Text,
    Tokens,
    Version,
)
from services.frontend.http.openai.chat_answer import ChatChunk, ChatCompletion
from services.frontend.http.openai.completion_answer import Completion
from services.frontend.http.openai.request import ChatBody, CompletionBody
from services.frontend.http.openai.tokens import DetokenizeBody, TokenizeBody
from services.frontend.http.operations import pipeline_page
from services.frontend.http.responses.answer import Response
from services.frontend.http.responses.request import ResponsesBody

PATH = "/openapi.json"
OPENAPI_VERSION = "3.1.0"
API_VERSION = "1"
"""Version of the HTTP API, as in its paths."""

_BODIES: dict[str, Any] = {
    "CompletionBody": CompletionBody,
    "ChatBody": ChatBody,
    "TokenizeBody": TokenizeBody,
    "DetokenizeBody": DetokenizeBody,
    "ResponsesBody": ResponsesBody,
    "MessagesBody": MessagesBody,
    "CountBody": CountBody,
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
    "Response": Response,
    "AnthropicMessage": AnthropicMessage,
    "TokenCount": TokenCount,
    "AnthropicError": AnthropicError,
}
"""Answers by the names of their schemas."""


def document(
    *, needs_key: bool, refuses_unknown: bool = False, has_page: bool = False
) -> dict[str, Any]:
    """Returns the document; `needs_key` says whether clients must show an API key,
    `refuses_unknown` whether bodies have no other fields than those of the document, and
    `has_page` whether the scheduler can be watched."""
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Orcinus",
            "version": API_VERSION,
            "description": "The OpenAI API of a served language model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": _paths(needs_key=needs_key, has_page=has_page),
        "components": {
            "schemas": _schemas(refuses_unknown=refuses_unknown),
            "responses": error_responses(may_forbid=needs_key and has_page),
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


def _paths(*, needs_key: bool, has_page: bool) -> dict[str, Any]:
    security: list[dict[str, list[str]]] = [{name: []} for name in SECURITY_SCHEMES if needs_key]
    errors = (*BY_SERVER, 429, *([401] if needs_key else ()))
    secured = {**_openai_paths(errors), **_conversation_paths(errors)}
    if has_page:
        watch = operations.watch((*errors, *([403] if needs_key else ())))
        secured[pipeline_page.EVENTS_PATH] = {"get": watch}
    for methods in secured.values():
        for operation in methods.values():
            operation["security"] = security
    return {**secured, **_public_paths()}


def _openai_paths(errors: operations.Errors) -> dict[str, Any]:
    """Returns the paths of the OpenAI API, and those of tokens, which other servers have, too."""
    models = operations.shown(
        "listModels", "Lists the model's names.", answer="ModelList", errors=errors
    )
    model = operations.shown(
        "retrieveModel", "Describes the one model.", answer="Model", errors=(*errors, 404)
    )
    model["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    complete = operations.generation(
        "createCompletion",
        body="CompletionBody",
        answer="Completion",
        chunk="Completion",
        errors=errors,
    )
    chat = operations.generation(
        "createChatCompletion",
        body="ChatBody",
        answer="ChatCompletion",
        chunk="ChatChunk",
        errors=errors,
    )
    tokenize = operations.posted(
        "tokenize",
        "Makes tokens of a prompt.",
        body="TokenizeBody",
        answer="Tokens",
        errors=errors,
    )
    detokenize = operations.posted(
        "detokenize",
        "Makes a text of tokens.",
        body="DetokenizeBody",
        answer="Text",
        errors=errors,
    )
    return {
        "/v1/models": {"get": models},
        "/v1/models/{model}": {"get": model},
        "/v1/completions": {"post": complete},
        "/v1/chat/completions": {"post": chat},
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": detokenize},
    }


def _conversation_paths(errors: operations.Errors) -> dict[str, Any]:
    """Returns the paths of the protocols that are translations."""
    respond = operations.conversation(
        "createResponse",
        body="ResponsesBody",
        answer="Response",
        last_event="`response.completed`, `response.incomplete` or `response.failed`, which has "
        "the `Response`",
        errors=errors,
    )
    message = operations.conversation(
        "createMessage",
        body="MessagesBody",
        answer="AnthropicMessage",
        last_event="`message_stop`, or `error` with an `AnthropicError`",
        errors=errors,
    )
    count = operations.posted(
        "countTokens", "Counts tokens.", body="CountBody", answer="TokenCount", errors=errors
    )
    return {
        "/v1/responses": {"post": respond},
        anthropic_errors.PATH: {"post": operations.with_anthropic_errors(message)},
        anthropic_errors.COUNT_PATH: {"post": operations.with_anthropic_errors(count)},
    }


def _public_paths() -> dict[str, Any]:
    """Returns the paths that need no key."""
    probes = {
        "health": "Says that the process is up.",
        "ready": "Says whether requests would be taken.",
        "serving": "Says whether requests get tokens, or why not.",
    }
    version = operations.shown(
        "version", "Tells the server's version; needs no key.", answer="Version", errors=BY_SERVER
    )
    this = operations.shown(
        "openapi", "Returns this document; needs no key.", answer=None, errors=BY_SERVER
    )
    docs = operations.shown(
        "docs", "Returns this document as a page; needs no key.", answer=None, errors=BY_SERVER
    )
    docs["responses"]["200"]["content"] = {"text/html": {"schema": {"type": "string"}}}
    return {
        **{f"/{name}": {"get": operations.probe(name, says)} for name, says in probes.items()},
        "/version": {"get": version},
        PATH: {"get": this},
        docs_page.PATH: {"get": docs},
    }


@cache
def _schemas(*, refuses_unknown: bool) -> Schemas:
    """Returns the schemas of all bodies and answers. These take long to make, so they are
    shared, and nobody may change them."""
    schemas = _schemas_of(_BODIES)
    if not refuses_unknown:
        for schema in schemas.values():
            if schema.get("additionalProperties") is False:
                del schema["additionalProperties"]
    schemas |= _schemas_of(_ANSWERS)
    add_ranges(schemas)
    return schemas


def _schemas_of(types: dict[str, Any]) -> Schemas:
    schemas: Schemas = {}
    for name, kind in types.items():
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), name: schema}
    return schemas
