"""The error tree in the shape of Anthropic's API, on the paths of that API.

{"type": "error", "error": {"type": ..., "message": ...}}

Statuses and headers are those of the same errors on other paths (`openai_errors`).
"""

import json
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Scope

from services.common import errors
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.openai.reply import Json
from services.frontend.http.protocol.reply import named_event
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.client_call import current_call

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"

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


def error_event(error: errors.OrcinusError) -> Event:
    """Returns the error as the last event of a stream."""
    return named_event("error", {"error": _error(_status(error), error.message)})


def name_request(scope: Scope, answer: Message) -> None:
    """Adds the name of a request to the start of its answer, if its path is of Anthropic's API."""
    call = current_call()
    if call is not None and scope["path"].startswith(PATH):
        name = (ID_HEADER.encode(), call.shown_id.encode())
        answer["headers"] = [*answer["headers"], name]


def translated(request: Request, response: Response) -> Response:
    """Returns the answer to a request that ends with an error, which is in OpenAI's shape, in this
    one if the path is of Anthropic's API."""
    if request.url.path not in (PATH, COUNT_PATH) or not response.body:
        return response
    message = json.loads(bytes(response.body))["error"]["message"]
    headers = dict(response.headers)
    del headers["content-length"], headers["content-type"]
    body = {"type": "error", "error": _error(response.status_code, message)}
    return JSONResponse(body, response.status_code, headers)


def _status(error: errors.OrcinusError) -> int:
    return openai_errors.error_response(error).status_code


def _error(status: int, message: str) -> Json:
    default = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"type": _TYPES.get(status, default), "message": message}
