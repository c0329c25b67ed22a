"""The record of a client's call over HTTP or gRPC: the id of the call, and how long it may take.

The code of the protocol begins the call once (`begin_call`), in the task that answers it. From then
on the call is the current call of that task, and code that answers, records or logs gets it with
`current_call`.
"""

import asyncio
import re
from contextvars import ContextVar
from dataclasses import dataclass

from services.common import errors
from services.frontend.request.request_id import new_request_id

ID_HEADER = "x-request-id"
"""HTTP header, or gRPC metadata entry, with the id that a client gives its request."""

TIMEOUT_HEADER = "x-request-timeout"
"""Header with the number of seconds that a request may take."""

MAX_TIMEOUT_S = 86_400

SECONDS = r"^[0-9]{1,5}(\.[0-9]{1,6})?$"
"""Regular expression for a number of seconds; the whole text must match."""

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """The record of one call of a client: its ids, its time limits, and when it began."""

    request_id: str
    """Id that the call has in this process."""
    client_id: str | None = None
    """Id that the client has given the call. None if the client gave none, or one whose form is not
    safe to log."""
    timeout: str | None = None
    """Text of the client's timeout header: the number of seconds that the call may take. None
    without the header."""
    time_left_s: float | None = None
    """Seconds that the call may take by the deadline of the protocol (gRPC); None if there is no
    such deadline."""
    began_at: float = 0.0
    """Time at which the call began, by the event loop's clock."""

    @property
    def shown_id(self) -> str:
        """Id of the call in replies to the client: the client's own id or, if there is none,
        `request_id`."""
        return self.client_id or self.request_id

    def deadline(self) -> float | None:
        """Returns the time at which the call must have ended, by the event loop's clock. Returns
        None if there is no limit.

        Raises:
            InvalidRequest: the client's timeout is not a number of seconds, or too large.
        """
        if self.time_left_s is not None:
            return self.began_at + self.time_left_s
        if self.timeout is None:
            return None
        seconds = float(self.timeout) if re.fullmatch(SECONDS, self.timeout) else 0.0
        if not 0 < seconds <= MAX_TIMEOUT_S:
            raise errors.InvalidRequest(
                TIMEOUT_HEADER,
                f"must be a number of seconds, as in 2.5, more than 0 and at most {MAX_TIMEOUT_S}",
            )
        return self.began_at + seconds


_current: ContextVar[ClientCall | None] = ContextVar("current", default=None)


def begin_call(
    client_id: str | None, *, timeout: str | None = None, time_left_s: float | None = None
) -> ClientCall:
    """Creates the record of a client's call, sets it as the current call of this task, and returns
    it. `client_id` is ignored if its form could do harm in logs."""
    if client_id is not None and _CLIENT_ID.fullmatch(client_id) is None:
        client_id = None
    call = ClientCall(
        request_id=new_request_id(),
        client_id=client_id,
        timeout=timeout,
        time_left_s=time_left_s,
        began_at=asyncio.get_running_loop().time(),
    )
    _current.set(call)
    return call


def current_call() -> ClientCall | None:
    """Returns the record of the client's call that this task answers, or None if there is no such
    call."""
    return _current.get()


def current_id() -> str | None:
    """Returns the id of the client's call that this task answers, in the form that the client sees
    (`ClientCall.shown_id`). Returns None if there is no such call."""
    call = _current.get()
    return None if call is None else call.shown_id
