"""Errors in the form of Anthropic's API.

    {"type": "error", "error": {"type": ..., "message": ...}}

An error has the same status and the same headers as in the other protocols.
"""

from typing import Literal

from typing_extensions import TypedDict

from services.common import errors
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.errors import Dialect, Failure, failure
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.transport.event_stream import Event, framed

ID_HEADER = "request-id"
"""Header in which Anthropic's clients look for the name of their request."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by their statuses, where they differ from the type of most errors."""


@answer_object
class AnthropicErrorObject(TypedDict):
    """An error; its message begins with the name of the field that is wrong, if a field is
    wrong."""

    type: str
    """Kind of the error, in Anthropic's words."""
    message: str
    """What is wrong, in words; begins with the field that is wrong."""


@answer_object
class AnthropicError(TypedDict):
    """The body of answers that refuse a request in Anthropic's protocol."""

    type: Literal["error"]
    """`error`."""
    error: AnthropicErrorObject
    """The error."""


def error_body(failed: Failure) -> AnthropicError:
    """Returns the body that tells of a failure."""
    most = "api_error" if failed.is_by_server else "invalid_request_error"
    kind = _TYPES.get(failed.status, most)
    return {"type": "error", "error": {"type": kind, "message": failed.message}}


def error_event(error: errors.OrcinusError) -> Event:
    """Returns the event of an error that ends a stream."""
    return framed(to_json(error_body(failure(error))), name=b"error")


DIALECT = Dialect(body=error_body, schema=AnthropicError, prefix="Anthropic", id_header=ID_HEADER)
