"""The error tree over HTTP: only this module knows which error has which status.

A protocol has a `Dialect`, in which it writes a `Failure` down.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pydantic_core
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.common import errors
from services.frontend.http.transport.media_types import JSON

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has gone away. No client reads this status."""

RETRY_HEADER = "x-should-retry"
"""Header that tells OpenAI's and Anthropic's clients whether to try again; without it they do
after each 408."""

_STATUSES: dict[type[errors.OrcinusError], tuple[int, str | None]] = {
    errors.InvalidRequest: (400, None),
    errors.TooLarge: (413, "too_large"),
    errors.Unsupported: (415, "unsupported_media_type"),
    errors.UnknownModel: (404, "model_not_found"),
    errors.TimedOut: (408, "timed_out"),
    errors.Unauthenticated: (401, "invalid_api_key"),
    errors.PermissionDenied: (403, "permission_denied"),
    errors.PoolFull: (429, "rate_limit_exceeded"),
    errors.Unavailable: (503, "unavailable"),
    errors.StaleEpoch: (503, "unavailable"),
    errors.RequestFailed: (500, "request_failed"),
    errors.RequestCancelled: (CLIENT_CLOSED_REQUEST, "cancelled"),
}
"""Status and code of each class of errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as HTTP has it, before a protocol writes it down."""

    status: int
    message: str
    param: str | None = None
    """Field of the body, or header, that is wrong."""
    code: str | None = None
    """Name of the error for programs."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_by_server(self) -> bool:
        """Whether the server has failed, and not the client."""
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form in which a protocol writes errors down."""

    body: Callable[[Failure], Mapping[str, object]]
    """Returns the body of an answer that refuses a request."""
    schema: type
    """Type of that body."""
    prefix: str = ""
    """Beginning of the names of such answers in the OpenAPI document."""
    id_header: str = ""
    """Header in which clients of the protocol look for their request's name, if they have one."""


def failure(error: errors.OrcinusError) -> Failure:
    """Returns an error of the tree as HTTP has it."""
    status, code = _STATUSES[type(error)]
    headers = {}
    if isinstance(error, errors.PoolFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.TimedOut):
        headers["connection"] = "close"
        if not error.may_retry:
            headers[RETRY_HEADER] = "false"
    return Failure(
        status=status,
        message=error.message,
        param=error.field if isinstance(error, errors.InvalidRequest) else None,
        code=code,
        headers=headers,
    )


def answer(request: Request, error: Exception, dialect: Dialect) -> Response:
    """Returns the answer to a request that ends with an error. An error that is not foreseen is a
    bug: the client learns only its status."""
    match error:
        case errors.OrcinusError():
            failed = failure(error)
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case HTTPException(status_code=405) if request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)  # with `Allow`
        case HTTPException():
            path = errors.shortened(request.url.path)
            failed = Failure(
                status=error.status_code,
                message=f"{error.detail}: {request.method} {path}",
                headers=error.headers or {},
            )
        case _:
            failed = Failure(status=500, message="internal error", code="internal_error")
    return json_response(dialect.body(failed), failed.status, failed.headers)


def json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an answer in JSON, in UTF-8."""
    return Response(pydantic_core.to_json(value), status, headers, media_type=JSON)
