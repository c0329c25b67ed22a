"""Ids of requests: 32 hexadecimal digits, of which the first eight are the time of creation. So if
another frontend resumes the request, it can show the same time of creation."""

import re
import secrets
import time

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


def new_request_id() -> str:
    """Returns an id that no other request has."""
    return f"{int(time.time()):08x}{secrets.token_hex(12)}"


def is_request_id(text: str) -> bool:
    """Returns whether a text has the form of a request id."""
    return _REQUEST_ID.fullmatch(text) is not None


def created_at(request_id: str) -> int:
    """Returns the time at which a request was created, in seconds since 1970."""
    return int(request_id[:8], 16)
