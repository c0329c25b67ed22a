"""The errors that a call may raise.

ClientError
├── ConnectionLost        no answer, or an incomplete answer
├── TimedOut              an answer that is not streamed took too long
├── UnexpectedAnswer      the answer does not come from Orcinus, or a proxy has changed it
└── ApiError              the server refuses the request, or ends it
    ├── InvalidRequest    a mistake of the caller; `field` names what is wrong
    ├── Unauthenticated   there is no key, or it is unknown
    ├── PermissionDenied  the key does not allow this
    ├── Overloaded        too many requests; `retry_after_s` says when to try again
    ├── Unavailable       the request cannot be served now
    │   └── GatewayTimedOut   a proxy stopped waiting for the answer
    └── RequestFailed     the request must not be retried
"""

import json
from typing import Any

import httpx


class ClientError(Exception):
    """Base of all errors of this package."""


class ConnectionLost(ClientError):
    """No answer was received, or the connection was lost before the end of the answer."""


class TimedOut(ClientError):
    """An answer that is not streamed took longer than `answer_timeout_s`. The call is not retried,
    since the answer would be computed again."""


class UnexpectedAnswer(ClientError):
    """The answer does not come from Orcinus; it may be a page of a proxy."""


class ApiError(ClientError):
    """The server refuses the request, or ends it."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """Status of the response; None for an error within a stream."""
        self.field = field
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(ApiError):
    """The request breaks a rule."""


class Unauthenticated(ApiError):
    """There is no API key, or it is unknown."""


class PermissionDenied(ApiError):
    """The API key does not allow this."""


class Overloaded(ApiError):
    """The server has too many requests at present."""


class Unavailable(ApiError):
    """The request cannot be served now."""


class GatewayTimedOut(Unavailable):
    """A proxy stopped waiting for the answer. The server may still compute the answer, so a call
    whose answer would be computed twice is not retried."""


class RequestFailed(ApiError):
    """The request failed, and a retry would fail too."""


MAY_BE_TRIED_AGAIN = (ConnectionLost, Overloaded, Unavailable)

STATUSES: dict[int, type[ApiError]] = {
    **dict.fromkeys((400, 404, 408, 413, 415, 422), InvalidRequest),
    401: Unauthenticated,
    403: PermissionDenied,
    429: Overloaded,
    **dict.fromkeys((502, 503), Unavailable),
    504: GatewayTimedOut,
}
_BY_CODE: dict[str | None, type[ApiError]] = {
    "rate_limit_exceeded": Overloaded,
    "unavailable": Unavailable,
}


def error_of(status: int, headers: httpx.Headers, content: bytes) -> ApiError:
    """Returns the error that a response stands for. A response of a proxy, which may not be JSON,
    is accepted too."""
    try:
        value = json.loads(content)["error"]
        fields = value if isinstance(value, dict) else {}
    except (ValueError, KeyError, TypeError):
        fields = {}
    message = fields.get("message") or content[:200].decode(errors="replace")
    return STATUSES.get(status, RequestFailed)(
        f"{status}: {message}",
        status=status,
        field=fields.get("param"),
        code=fields.get("code"),
        retry_after_s=_seconds(headers.get("retry-after")),
    )


def error_in_stream(value: object) -> ApiError:
    """Returns the error that an event of a stream stands for."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {"message": value}
    code = fields.get("code")
    kind = _BY_CODE.get(code, RequestFailed)
    return kind(str(fields.get("message")), field=fields.get("param"), code=code)


def _seconds(text: str | None) -> float | None:
    """Returns the seconds of a Retry-After header; None for its other form, a date."""
    return float(text) if text is not None and text.isdecimal() else None
