"""The headers of a request, to be looked up many times."""

from collections.abc import Mapping

from starlette.requests import Request

_SCOPE_KEY = "orcinus.headers"


def headers_of(request: Request) -> Mapping[str, str]:
    """Returns the headers of a request by their names in lower case; of several with one name, the
    first. Starlette's own look through all of them each time."""
    scope = request.scope
    headers: Mapping[str, str] | None = scope.get(_SCOPE_KEY)
    if headers is None:
        headers = scope[_SCOPE_KEY] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers
