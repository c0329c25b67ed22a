"""Looks up the headers of a request quickly."""

from collections.abc import Mapping

from starlette.requests import Request

_SCOPE_KEY = "orcinus.headers"


def headers_of(request: Request) -> Mapping[str, str]:
    """Returns the headers of a request, keyed by name in lower case. If a name occurs several
    times, the first value counts. The result is cached, because Starlette searches all headers at
    each lookup."""
    scope = request.scope
    headers: Mapping[str, str] | None = scope.get(_SCOPE_KEY)
    if headers is None:
        headers = scope[_SCOPE_KEY] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers
