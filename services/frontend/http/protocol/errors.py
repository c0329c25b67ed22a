"""The errors of `services.common.errors` over HTTP. Only this module knows the HTTP status of each
class of errors.

Each protocol has a `Dialect`, which turns a `Failure` into the protocol's form.
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
"""Status that nginx uses for a request whose client has disconnected. No client reads this
status."""

RETRY_HEADER = "x-should-retry"
"""Header that tells clients of OpenAI and of Anthropic whether to retry. Without the header, these
clients retry after each status 408 and each status from 500 on."""

_STATUSES: dict[type[errors.OrcinusError], tuple[int, str | None]] = {
    errors.InvalidRequest: (400, None),
    errors.ContextOverflow: (400, "context_length_exceeded"),
    errors.TooLarge: (413, "too_large"),
    errors.Unsupported: (415, "unsupported_media_type"),
    errors.UnknownModel: (404, "model_not_found"),
    errors.UnknownAdapter: (404, "adapter_not_found"),
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
    """Status, message and headers of an error, independent of a protocol."""

    status: int
    message: str
    param: str | None = None
    """Name of the field of the body, or of the header, that is wrong."""
    code: str | None = None
    """Name of the error, which programs can compare."""
    headers: Mapping[str, str] = field(default_factory=dict)
    overflow: errors.ContextOverflow | None = None
    """The original error if the prompt exceeds the model's context, else None. Some protocols
    describe this error in words of their own."""

    @property
    def is_by_server(self) -> bool:
        """Whether the error is a fault of the server, and not of the client."""
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form of errors in a protocol."""

    body: Callable[[Failure], Mapping[str, object]]
    """Function that makes the body of an answer that refuses a request."""
    schema: type
    """Type of the body of an answer that refuses a request."""
    prefix: str = ""
    """Prefix of the names of the protocol's error answers in the OpenAPI document."""
    version_header: str = ""
    """Header in which clients of the protocol send the protocol's version; empty if there is no
    such header."""
    id_header: str = ""
    """Header in which clients of the protocol look for the id of a request; empty if there is no
    such header."""


def failure(error: errors.OrcinusError) -> Failure:
    """Converts an error to a `Failure`, with the HTTP status and the headers of the error."""
    status, code = _STATUSES[type(error)]
    headers = {}
    if isinstance(error, errors.PoolFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.TimedOut):
        headers["connection"] = "close"
    if not _may_retry(error):
        headers[RETRY_HEADER] = "false"
    return Failure(
        status=status,
        message=error.message,
        param=error.field if isinstance(error, errors.InvalidRequest) else None,
        code=code,
        headers=headers,
        overflow=error if isinstance(error, errors.ContextOverflow) else None,
    )


def _may_retry(error: errors.OrcinusError) -> bool:
    """Returns whether the same request may succeed later. A request that a pipeline cannot compute
    fails again, and may end a worker again."""
    if isinstance(error, errors.TimedOut):
        return error.may_retry
    return not isinstance(error, errors.RequestFailed)


def answer(request: Request, error: Exception, dialect: Dialect) -> Response:
    """Returns the answer to a request that ends with an error. Exceptions of unknown types are
    bugs: for such an exception the client only gets the status 500, without details."""
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
    """Returns an answer with `value` as JSON in UTF-8."""
    return Response(pydantic_core.to_json(value), status, headers, media_type=JSON)
