"""Handles unknown fields of bodies, and items that are left out of the prompt because the server
does not support their type. By default the server ignores such fields and items, and names them in
a header of the answer and in the log. A setting makes the server refuse a body that has them.

Clients may send an unknown field with every request, and may make up any name. The log therefore
has only one line for each field, and a limited number of lines in all.
"""

import logging
import re

from starlette.requests import Request
from starlette.responses import Response

from services.common import errors

log = logging.getLogger(__name__)

HEADER = "x-orcinus-ignored-fields"
"""Header of an answer that names the ignored fields. If there are many, only the first fields are
named."""

MAX_LOGGED = 256
"""Largest number of fields that a process logs."""

_SCOPE_KEY = "orcinus.ignored_fields"

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.$-]")


class UnknownFields:
    """Deals with the unknown fields of bodies: refuses the body, or names the fields in the log and
    in a header."""

    def __init__(self, *, are_refused: bool = False) -> None:
        self.are_refused = are_refused
        """Whether a body with unknown fields is refused."""
        self._logged: set[str] = set()

    def found(self, request: Request, paths: tuple[str, ...]) -> None:
        """Logs the unknown fields of a request's body, and stores their names in the request's
        scope, where `mark` finds them.

        Raises:
            InvalidRequest: unknown fields are refused.
        """
        if self.are_refused:
            raise errors.InvalidRequest(paths[0], "unknown field")
        names = sorted(_NOT_IN_NAMES.sub("?", path) for path in paths)
        request.scope[_SCOPE_KEY] = ", ".join(names)
        for name in names:
            self._log(name)

    def _log(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.info("ignoring an unknown field of requests: %s", name)


def mark(request: Request, response: Response) -> Response:
    """Adds a header that names the ignored fields of the request's body to `response`, if fields
    were ignored. Returns `response`."""
    if names := request.scope.get(_SCOPE_KEY):
        response.headers[HEADER] = names
    return response
