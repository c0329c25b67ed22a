"""An operation of the OpenAPI document: the description of one route."""

from typing import Any

from services.frontend.http.bodies import unknown_fields
from services.frontend.http.docs.components import (
    BY_SERVER,
    SECURITY_SCHEMES,
    error_name,
    reference,
    schema_of,
)
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.protocol.body import RequestBody
from services.frontend.http.protocol.errors import Dialect
from services.frontend.http.protocol.generating import LEFT_OUT, UNENFORCED
from services.frontend.http.protocol.route import Access, Parameter, Route
from services.frontend.http.transport import media_types
from services.frontend.http.transport.media_types import EVENTS, JSON
from services.frontend.request.client_call import ID_HEADER, MAX_TIMEOUT_S, SECONDS, TIMEOUT_HEADER

_OF_BODIES: tuple[Parameter, ...] = (
    {
        "name": ID_HEADER,
        "in": "header",
        "schema": {"type": "string"},
        "description": "The client's name for the request; comes back with the answer.",
    },
    {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "schema": {"type": "string", "pattern": SECONDS},
        "description": "Seconds that the request may take, waiting included; at most "
        f"{MAX_TIMEOUT_S}.",
    },
)
"""Header parameters of all requests with a body."""

_IGNORED_FIELDS = {
    unknown_fields.HEADER: {
        "description": "Unknown fields of the body, which were ignored, if there were any.",
        "schema": {"type": "string"},
    }
}
_NOT_KEPT = {
    UNENFORCED: {
        "description": "Keywords of JSON schemas that are not enforced, if there are any.",
        "schema": {"type": "string"},
    },
    LEFT_OUT: {
        "description": "Fields whose values the model's chat template leaves out, if it does.",
        "schema": {"type": "string"},
    },
}


def dialect_of(route: Route) -> Dialect:
    """Returns the dialect of the errors of a route."""
    return route.dialect or openai_errors.DIALECT


def error_statuses(route: Route, *, needs_key: bool) -> list[int]:
    """Returns the statuses of the errors with which a request to the route may be refused, in
    ascending order."""
    statuses = {*BY_SERVER, *route.errors}
    if route.access is not Access.ANY:
        statuses |= {429, 401} if needs_key else {429}
    if route.access in (Access.WATCH, Access.MANAGE) and needs_key:
        statuses.add(403)
    if route.body is not None:
        statuses |= {404, 413, 415}
    return sorted(statuses)


def operation(route: Route, *, needs_key: bool) -> dict[str, Any]:
    """Returns the operation that describes a route. `needs_key` says whether callers must send an
    API key."""
    is_secured = route.access is not Access.ANY and needs_key
    said: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.description,
        "security": [{name: []} for name in SECURITY_SCHEMES] if is_secured else [],
        "responses": {
            "200": _answer(route),
            **{
                str(status): reference("responses", error_name(status, dialect_of(route)))
                for status in error_statuses(route, needs_key=needs_key)
            },
        },
    }
    if route.answers_503:
        either = [schema_of(route.answer), schema_of(dialect_of(route).schema)]
        said["responses"]["503"] = {
            "description": "The answer is no, or the server refuses the request.",
            "content": {JSON: {"schema": {"anyOf": either}}},
        }
    parameters = route.parameters if route.body is None else (*_OF_BODIES, *route.parameters)
    if parameters:
        said["parameters"] = list(parameters)
    if route.body is not None:
        content = {JSON: {"schema": schema_of(route.body)}}
        said["requestBody"] = {"required": True, "content": content}
    return said


def _answer(route: Route) -> dict[str, Any]:
    described: dict[str, Any] = {"description": f"{route.description} {route.stream}".rstrip()}
    match route.media_type:
        case media_types.JSON:
            schema = {"type": "object"} if route.answer is None else schema_of(route.answer)
            described["content"] = {JSON: {"schema": schema}}
        case media_types.EVENTS:
            described["content"] = {EVENTS: {}}
        case other:
            media_type = other.partition(";")[0]
            described["content"] = {media_type: {"schema": {"type": "string"}}}
    if route.stream:
        # No schema: tools disagree whether a schema describes the stream or each event.
        described["content"][EVENTS] = {}
    if route.body is not None:
        generates = issubclass(route.body, RequestBody)
        described["headers"] = _IGNORED_FIELDS | (_NOT_KEPT if generates else {})
    return described
