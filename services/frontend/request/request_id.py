"""Names of requests: 32 hexadecimal digits, of which the first eight are the time of birth.

So a request that goes on at another frontend is as old there as it was here.
"""

import re
import secrets
import time

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


def new_request_id() -> str:
    """Returns a name that no other request has."""
    return f"{int(time.time()):08x}{secrets.token_hex(12)}"


def is_request_id(text: str) -> bool:
    """Returns whether the text has the form of a request's name."""
    return _REQUEST_ID.fullmatch(text) is not None


def created_at(request_id: str) -> int:
    """Returns when the request was made, in seconds since 1970."""
    return int(request_id[:8], 16)
