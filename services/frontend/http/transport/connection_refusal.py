"""Errors that are sent to a client before the connection is closed."""

import json
from http import HTTPStatus

from services.frontend.request.refusals import Refusal


class Refused(Exception):
    """Raised if a client has exceeded a limit or broken a rule of HTTP. The connection then sends
    an answer with the status `status` and closes."""

    def __init__(self, status: HTTPStatus, message: str, reason: Refusal) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason


def malformed(message: str) -> Refused:
    """Returns the error for received data that is not valid HTTP."""
    return Refused(HTTPStatus.BAD_REQUEST, message, Refusal.MALFORMED)


def answer(status: HTTPStatus, message: str) -> bytes:
    """Returns a whole HTTP answer, whose body is an error in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    body = json.dumps({"error": error}).encode()
    head = (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n"
    )
    retry = b"retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else b""
    return head % (status, status.phrase.encode(), len(body)) + retry + b"\r\n" + body
