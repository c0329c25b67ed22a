"""The error tree in the OpenAI API's shape: the one place where it meets HTTP.

{"error": {"message": ..., "type": ..., "param": the field, "code": ...}}
"""

import math
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from services.common import errors

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has gone away; nobody reads it."""

RETRY_HEADER = "x-should-retry"
"""Header that tells OpenAI's and Anthropic's clients whether to try again; without it they do
after each 408."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the API writes down a class of errors."""

    status: int
    type: str
    code: str | None = None


_KINDS: dict[type[errors.OrcinusError], _Kind] = {
    errors.InvalidRequest: _Kind(400, "invalid_request_error"),
    errors.TooLarge: _Kind(413, "invalid_request_error", "too_large"),
    errors.Unsupported: _Kind(415, "invalid_request_error", "unsupported_media_type"),
    errors.UnknownModel: _Kind(404, "invalid_request_error", "model_not_found"),
    errors.TimedOut: _Kind(408, "invalid_request_error", "timed_out"),
    errors.Unauthenticated: _Kind(401, "invalid_request_error", "invalid_api_key"),
    errors.PermissionDenied: _Kind(403, "invalid_request_error", "permission_denied"),
    errors.PoolFull: _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Unavailable: _Kind(503, "server_error", "unavailable"),
    errors.StaleEpoch: _Kind(503, "server_error", "unavailable"),
    errors.RequestFailed: _Kind(500, "server_error", "request_failed"),
    errors.RequestCancelled: _Kind(CLIENT_CLOSED_REQUEST, "invalid_request_error", "cancelled"),
}


def error_object(error: errors.OrcinusError) -> dict[str, Any]:
    """Returns the error as an event of a stream, or as a body."""
    kind = _KINDS[type(error)]
    field = error.field if isinstance(error, errors.InvalidRequest) else None
    return _object(error.message, kind.type, field, kind.code)


def error_response(error: errors.OrcinusError) -> Response:
    """Returns the error as a complete response."""
    headers = {}
    if isinstance(error, errors.PoolFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.TimedOut):
        headers["connection"] = "close"
        if not error.may_retry:
            headers[RETRY_HEADER] = "false"
    return JSONResponse(error_object(error), _KINDS[type(error)].status, headers)


def answer(request: Request, error: Exception) -> Response:
    """Returns the answer to a request that ends with an error; any that is not foreseen is a bug,
    of which nobody is told anything."""
    match error:
        case errors.OrcinusError():
            return error_response(error)
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case HTTPException():
            return _http_response(request, error)
    return JSONResponse(_object("internal error", "server_error", None, "internal_error"), 500)


def _http_response(request: Request, error: HTTPException) -> Response:
    """Returns the answer to a request of an unknown path or method, or OPTIONS of a known path."""
    if request.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)  # with `Allow`
    message = f"{error.detail}: {request.method} {errors.shortened(request.url.path)}"
    body = _object(message, "invalid_request_error", None, None)
    return JSONResponse(body, error.status_code, error.headers)


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
