"""A call of a client, as its protocol knows it: its name, and how long it may take.

Like the trace that it belongs to, it is current in the task that answers the call, for good: a
protocol begins it once, and whoever answers, records or logs looks it up.
"""

import asyncio
import re
from contextvars import ContextVar
from dataclasses import dataclass

from services.common import errors
from services.frontend.request.request_id import new_request_id

ID_HEADER = "x-request-id"
"""Header, or gRPC metadata, with a name that a client has for its request."""

TIMEOUT_HEADER = "x-request-timeout"
"""Header with the seconds that a request may take."""

MAX_TIMEOUT_S = 86_400

SECONDS = r"^[0-9]{1,5}(\.[0-9]{1,6})?$"
"""A pattern of numbers of seconds, for `fullmatch`."""

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """A call of a client."""

    request_id: str
    """The name that it has here."""
    client_id: str | None = None
    """The name that its client has given it, if that can be written anywhere."""
    timeout: str | None = None
    """The seconds that it may take, as its client wrote them."""
    time_left_s: float | None = None
    """The seconds that it may take, where its protocol has a deadline."""
    began_at: float = 0.0
    """When it began, by the event loop's clock."""

    @property
    def shown_id(self) -> str:
        """The name that its client is told: its own, if it has one."""
        return self.client_id or self.request_id

    def deadline(self) -> float | None:
        """Returns when it must have ended, by the event loop's clock; None if it may take any time.

        Raises:
            InvalidRequest: what the client wrote is not a number of seconds, or too large.
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
    """Makes a call current in this task, and returns it. A client's name of a form that could harm
    logs is left out."""
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
    """Returns the call that this task answers, if any."""
    return _current.get()


def current_id() -> str | None:
    """Returns the name, as its client knows it, of the call that this task answers, if any."""
    call = _current.get()
    return None if call is None else call.shown_id
