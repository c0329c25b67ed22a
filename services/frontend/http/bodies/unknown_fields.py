"""Handles unknown fields of bodies. By default unknown fields are ignored, and named in a header of
the answer and in the log. A setting makes the server refuse bodies with unknown fields.

Clients may send an unknown field with every request, and may make up any name. The log therefore
has only one line for each set of names, and a limited number of lines in an hour.
"""

import logging
import re
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from services.common import errors

log = logging.getLogger(__name__)

HEADER = "x-orcinus-ignored-fields"
"""Header of an answer with the names of the ignored fields. If there are many, only the first
fields are named."""

LOGGED_AGAIN_S = 3600.0
"""Seconds after which a set of names may be logged again."""

MAX_LOGGED = 64
"""Largest number of lines in the log within `LOGGED_AGAIN_S`."""

_SCOPE_KEY = "orcinus.ignored_fields"

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.$-]")


class UnknownFields:
    """Refuses the unknown fields of bodies, or names them in the log and in a header."""

    def __init__(
        self, *, are_refused: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.are_refused = are_refused
        """Whether a body with unknown fields is refused."""
        self._clock = clock
        self._logged: set[str] = set()
        self._logged_until = 0.0

    def found(self, request: Request, paths: tuple[str, ...]) -> None:
        """Logs the unknown fields of a request's body, and keeps the names for `mark`.

        Raises:
            InvalidRequest: unknown fields are refused.
        """
        if self.are_refused:
            raise errors.InvalidRequest(paths[0], "unknown field")
        names = ", ".join(sorted(_NOT_IN_NAMES.sub("?", path) for path in paths))
        request.scope[_SCOPE_KEY] = names
        self._log(names)

    def _log(self, names: str) -> None:
        now = self._clock()
        if now >= self._logged_until:
            self._logged.clear()
            self._logged_until = now + LOGGED_AGAIN_S
        if names not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(names)
            log.warning("ignoring unknown fields of requests: %s", names)


def mark(request: Request, response: Response) -> Response:
    """Returns the response to a request. If fields of the body were ignored, adds a header with the
    names of the fields."""
    if names := request.scope.get(_SCOPE_KEY):
        response.headers[HEADER] = names
    return response
