"""Handlers of GET /health, /ready, /serving and /version, which need no key."""

from typing import NotRequired

from typing_extensions import TypedDict

from services.common.version import VERSION
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api


@answer_object
class Status(TypedDict):
    """The answer to a probe."""

    status: str
    """State of the server: `ok`, `ready`, `not ready`, `serving` or `not serving`."""
    reason: NotRequired[str]
    """Reason why requests get no tokens."""


def health(_: Api) -> tuple[bool, Status]:
    """Returns True and the status `ok`. If the process runs, it is healthy."""
    return True, {"status": "ok"}


def ready(api: Api) -> tuple[bool, Status]:
    """Returns whether requests should be sent to this server. A server that is about to stop still
    answers requests, but returns False here."""
    is_ready = api.models.is_ready
    return is_ready, {"status": "ready" if is_ready else "not ready"}


def serving(api: Api) -> tuple[bool, Status]:
    """Returns whether new requests to at least one model get tokens, and the reason if not."""
    if reason := api.models.reason_against_serving():
        return False, {"status": "not serving", "reason": reason}
    return True, {"status": "serving"}


@answer_object
class Version(TypedDict):
    """The version of the server."""

    version: str
    """Version of the server."""


def version() -> Version:
    """Returns the version of the server."""
    return {"version": VERSION}
