"""The components of the OpenAPI document other than schemas: error responses by status, and the
headers that may carry the API key.

Operations and schemas refer to components by name.
"""

from collections.abc import Iterable
from typing import Any

from services.frontend.http.protocol.errors import Dialect
from services.frontend.http.transport.media_types import JSON

BY_SERVER = (400, 408, 431, 500, 503)
"""Statuses of errors that every request may get. Some of these errors come from the HTTP server
before the request reaches an operation."""

_MEANINGS = {
    400: "A field or header is wrong; `param` names it.",
    401: "There is no API key, or the key is not known.",
    403: "This API key may not do it.",
    404: "There is no such model.",
    408: "The request did not come in time, or took longer than it may.",
    413: "The body is too large.",
    415: "The body is compressed, or has a type that is no JSON.",
    429: "Too much is in the making, or asked for by this API key, at the moment.",
    431: "The request line and its headers are too large.",
    500: "The request failed, or there is a bug; it must not be tried again.",
    503: "There is no pipeline at the moment, or too many clients are connected.",
}

SECURITY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The two headers that may carry the API key. A request needs only one of them."""

_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: {
        "Retry-After": {
            "required": True,
            "description": "Seconds until it may be tried again.",
            "schema": {"type": "integer", "minimum": 1},
        }
    },
}


def reference(section: str, name: str) -> dict[str, str]:
    """Returns a reference to the component `name` in a section of the document."""
    return {"$ref": f"#/components/{section}/{name}"}


def schema_of(kind: type) -> dict[str, str]:
    """Returns a reference to the schema of a type."""
    return reference("schemas", kind.__name__)


def error_name(status: int, dialect: Dialect) -> str:
    """Returns the name of the error response for a status in a protocol: the prefix of the
    protocol's `dialect`, `Error` and the status."""
    return f"{dialect.prefix}Error{status}"


def error_response(status: int, dialect: Dialect, others: Dialect) -> dict[str, Any]:
    """Returns the error response for a status in the OpenAPI document. `dialect` is the form of
    errors in the protocol of the operations that have the response. `others` is the form of the
    errors that the HTTP server sends before it knows the path of a request: such an error may come
    instead."""
    kinds = list(dict.fromkeys((dialect.schema, others.schema)))
    schema = schema_of(kinds[0])
    described: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {
            JSON: {"schema": schema if len(kinds) == 1 else {"anyOf": list(map(schema_of, kinds))}}
        },
    }
    if status in _HEADERS:
        described["headers"] = _HEADERS[status]
    return described


def error_responses(
    statuses: Iterable[tuple[int, Dialect]], others: Dialect
) -> dict[str, dict[str, Any]]:
    """Returns the error responses for pairs of a status and a dialect, keyed by name. `others` is
    explained in `error_response`."""
    return {
        error_name(status, dialect): error_response(status, dialect, others)
        for status, dialect in statuses
    }
