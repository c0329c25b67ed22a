"""Errors in the form of OpenAI's API. All paths that belong to no other protocol use this form.

{"error": {"message": ..., "type": ..., "param": the field, "code": ...}}
"""

from http import HTTPStatus

from typing_extensions import TypedDict

from services.common import errors
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.errors import Dialect, Failure, failure
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.transport.event_stream import Event, framed


@answer_object
class ErrorObject(TypedDict):
    """The description, the kind and the code of an error."""

    message: str
    """Description of the error."""
    type: str
    """Kind of the error."""
    param: str | None
    """Name of the wrong field, or null."""
    code: str | None
    """Code of the error, or null."""


@answer_object
class Error(TypedDict):
    """The body of every answer that refuses a request, and the last event of a stream that
    fails."""

    error: ErrorObject
    """The error."""


def error_body(failed: Failure) -> Error:
    """Returns the body that describes a failure."""
    kind = "server_error" if failed.is_by_server else "invalid_request_error"
    if failed.status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    error: ErrorObject = {
        "message": failed.message,
        "type": kind,
        "param": failed.param,
        "code": failed.code,
    }
    return {"error": error}


def error_event(error: errors.OrcinusError) -> Event:
    """Returns the event that reports an error and ends a stream."""
    return framed(to_json(error_body(failure(error))))


DIALECT = Dialect(body=error_body, schema=Error)
