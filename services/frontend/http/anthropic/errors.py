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

VERSION_HEADER = "anthropic-version"
"""Header with the version of the API that each of Anthropic's clients sends."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Type of the error in Anthropic's API, keyed by status. An error with another status is an
`api_error` if the server is at fault, else an `invalid_request_error`."""


@answer_object
class AnthropicErrorObject(TypedDict):
    """The type and the message of an error."""

    type: str
    """Kind of the error, as named in Anthropic's API."""
    message: str
    """Description of the error, which begins with the name of the wrong field if a field is
    wrong."""


@answer_object
class AnthropicError(TypedDict):
    """Body of an answer that refuses a request in Anthropic's protocol."""

    type: Literal["error"]
    """Always `error`."""
    error: AnthropicErrorObject
    """The error."""


def error_body(failed: Failure) -> AnthropicError:
    """Returns the body that describes a failure."""
    most = "api_error" if failed.is_by_server else "invalid_request_error"
    kind = _TYPES.get(failed.status, most)
    message = failed.message if failed.overflow is None else _overflow_message(failed.overflow)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _overflow_message(overflow: errors.ContextOverflow) -> str:
    """Returns the message for a conversation that is too long. Anthropic's clients recognise this
    error by the words of the message."""
    n_prompt, n_answer, context = overflow.n_prompt, overflow.n_answer, overflow.context
    if n_answer:
        return (
            f"input length and `max_tokens` exceed context limit: {n_prompt} + {n_answer} > "
            f"{context}, decrease input length or `max_tokens` and try again"
        )
    if n_prompt:
        return f"prompt is too long: {n_prompt} tokens > {context - 1} maximum"
    return f"prompt is too long: {overflow.message}"


def error_event(error: errors.OrcinusError) -> Event:
    """Returns the event that reports an error and ends a stream."""
    return framed(to_json(error_body(failure(error))), name=b"error")


DIALECT = Dialect(
    body=error_body,
    schema=AnthropicError,
    prefix="Anthropic",
    version_header=VERSION_HEADER,
    id_header=ID_HEADER,
)
