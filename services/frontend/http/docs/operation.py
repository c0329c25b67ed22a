"""The operations of the HTTP API, as the OpenAPI document describes them.

An operation is a method of a path. It refers to schemas and errors by their names.
"""

from typing import Any

from services.frontend.http.bodies import unknown_fields
from services.frontend.http.docs.components import (
    BY_SERVER,
    anthropic_error_name,
    error_name,
    reference,
)
from services.frontend.http.openai import event_id
from services.frontend.http.transport.media_types import EVENTS, JSON
from services.frontend.request.client_call import ID_HEADER, MAX_TIMEOUT_S, SECONDS, TIMEOUT_HEADER

Operation = dict[str, Any]
Errors = tuple[int, ...]
"""Statuses of the errors that an operation may answer with."""


def shown(name: str, summary: str, *, answer: str | None, errors: Errors) -> Operation:
    """Returns an operation without a body; None stands for an answer that is any object."""
    schema = {"type": "object"} if answer is None else reference("schemas", answer)
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": summary, "content": {JSON: {"schema": schema}}},
            **{str(status): reference("responses", error_name(status)) for status in errors},
        },
    }


def probe(name: str, summary: str) -> Operation:
    """Returns an operation that says whether all is well."""
    operation = shown(name, summary, answer="Status", errors=BY_SERVER)
    either = [reference("schemas", "Status"), reference("schemas", "Error")]
    operation["responses"]["503"] = {
        "description": "It would, or does, not.",
        "content": {JSON: {"schema": {"anyOf": either}}},
    }
    return operation


def posted(name: str, summary: str, *, body: str, answer: str, errors: Errors) -> Operation:
    """Returns an operation with a body."""
    operation = shown(name, summary, answer=answer, errors=(*errors, 404, 413, 415))
    operation["parameters"] = [
        _header(ID_HEADER, "The client's name for the request; comes back with the answer."),
        _header(
            TIMEOUT_HEADER,
            f"Seconds that the request may take, waiting included; at most {MAX_TIMEOUT_S}.",
            pattern=SECONDS,
        ),
    ]
    operation["requestBody"] = {
        "required": True,
        "content": {JSON: {"schema": reference("schemas", body)}},
    }
    operation["responses"]["200"]["headers"] = {
        unknown_fields.HEADER: {
            "description": "Fields of the body that nobody knows, if it had any.",
            "schema": {"type": "string"},
        }
    }
    return operation


def generation(name: str, *, body: str, answer: str, chunk: str, errors: Errors) -> Operation:
    """Returns an operation that generates, as OpenAI's clients know it: its stream has chunks."""
    operation = posted(name, "Continues what it is given.", body=body, answer=answer, errors=errors)
    operation["parameters"].append(
        _header(
            event_id.HEADER, "Id of the last event of a stream that broke; only with `resumption`."
        )
    )
    _stream(
        operation,
        f"With `stream`. The data of each event is a `{chunk}`, or an `Error` that ends "
        "the stream; the last one of a stream that ends well is `[DONE]`.",
    )
    return operation


def conversation(
    name: str, *, body: str, answer: str, last_event: str, errors: Errors
) -> Operation:
    """Returns an operation that continues a conversation in a protocol whose events have names."""
    operation = posted(name, "Continues a conversation.", body=body, answer=answer, errors=errors)
    _stream(
        operation,
        f"With `stream`. Events have a name, which is their `type`, too; the last is {last_event}.",
    )
    return operation


def watch(errors: Errors) -> Operation:
    """Returns the operation that streams what the scheduler does."""
    operation = shown(
        "watchPipeline",
        "Streams what the scheduler does; with API keys, only to those with `may_watch`.",
        answer=None,
        errors=errors,
    )
    operation["parameters"] = [
        {
            "name": "decisions",
            "in": "query",
            "description": "Whether to tell also what the scheduling core is told.",
            "schema": {"type": "boolean", "default": False},
        }
    ]
    operation["responses"]["200"]["content"] = {EVENTS: {}}
    return operation


def with_anthropic_errors(operation: Operation) -> Operation:
    """Returns the operation as one that refuses requests as Anthropic's do."""
    responses = {
        status: response
        if status == "200"
        else reference("responses", anthropic_error_name(int(status)))
        for status, response in operation["responses"].items()
    }
    return {**operation, "responses": responses}


def _header(name: str, description: str, **schema: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "description": description,
        "schema": {"type": "string", **schema},
    }


def _stream(operation: Operation, description: str) -> None:
    """Adds that the answer may be a stream of events. It has no schema: tools disagree whether one
    would be of the stream or of each event."""
    answer = operation["responses"]["200"]
    answer["description"] += f" {description}"
    answer["content"][EVENTS] = {}
