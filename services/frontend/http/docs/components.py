"""The components of the OpenAPI document besides schemas: errors by status, and ways to show a key.

Operations and schemas refer to components by their names.
"""

from typing import Any

from services.frontend.http.transport.media_types import JSON

BY_SERVER = (400, 408, 431, 500, 503)
"""Statuses of errors that every request may meet: the server refuses some before they get to an
operation."""

_MEANINGS = {
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


FORBIDDEN = "This API key may not do it."

SECURITY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The two headers of which either may have the API key."""


def error_responses(*, may_forbid: bool) -> dict[str, Any]:
    """Returns all errors by their names; `may_forbid` says whether some keys may not do all."""
    return {
        **({error_name(403): _error(403)} if may_forbid else {}),
        **{error_name(status): _error(status) for status in _MEANINGS},
        **{anthropic_error_name(status): _anthropic_error(status) for status in _MEANINGS},
    }


def error_name(status: int) -> str:
    """Returns the name of the error that has a status."""
    return f"Error{status}"


def anthropic_error_name(status: int) -> str:
    """Returns the name of the error that has a status on one of Anthropic's paths."""
    return f"AnthropicError{status}"


def reference(section: str, name: str) -> dict[str, str]:
    """Returns a reference to a component of the document."""
    return {"$ref": f"#/components/{section}/{name}"}


def _error(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": FORBIDDEN if status == 403 else _MEANINGS[status],
        "content": {JSON: {"schema": reference("schemas", "Error")}},
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


def _anthropic_error(status: int) -> dict[str, Any]:
    """Returns the error of a path of Anthropic's, unless the server refuses the request before it
    knows the path."""
    either = [reference("schemas", "AnthropicError"), reference("schemas", "Error")]
    return {**_error(status), "content": {JSON: {"schema": {"anyOf": either}}}}
