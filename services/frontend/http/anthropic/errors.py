"""Errors in the form of Anthropic's API.

    {"type": "error", "error": {"type": ..., "message": ...}}

The statuses and headers of errors are equal in all protocols.
"""

from typing import Literal

from typing_extensions import TypedDict

from services.common import errors
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.errors import Dialect, Failure, failure
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.transport.event_stream import Event, framed

ID_HEADER = "request-id"
"""Header in which Anthropic's clients look for the id of a request."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Type of the error for each status that has a special type. Errors with other statuses are an
`api_error` or an `invalid_request_error`."""


@answer_object
class AnthropicErrorObject(TypedDict):
    """An error."""

    type: str
    """Kind of the error, as named in Anthropic's API."""
    message: str
    """Description of the error, which begins with the name of the wrong field if a field is
    wrong."""


@answer_object
class AnthropicError(TypedDict):
    """Body of an answer that refuses a request in Anthropic's protocol."""

    type: Literal["error"]
    """`error`."""
    error: AnthropicErrorObject
    """The error."""


def error_body(failed: Failure) -> AnthropicError:
    """Returns the body that describes a failure."""
    most = "api_error" if failed.is_by_server else "invalid_request_error"
    kind = _TYPES.get(failed.status, most)
    return {"type": "error", "error": {"type": kind, "message": failed.message}}


def error_event(error: errors.OrcinusError) -> Event:
    """Returns the event of an error that ends a stream."""
    return framed(to_json(error_body(failure(error))), name=b"error")


DIALECT = Dialect(body=error_body, schema=AnthropicError, prefix="Anthropic", id_header=ID_HEADER)
