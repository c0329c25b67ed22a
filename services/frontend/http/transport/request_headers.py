"""The headers of a request, for many lookups."""

from collections.abc import Mapping

from starlette.requests import Request

_SCOPE_KEY = "orcinus.headers"


def headers_of(request: Request) -> Mapping[str, str]:
    """Returns the headers of a request by their names in lower case, with the first value of each
    name. A lookup in the headers of Starlette goes through all of them."""
    scope = request.scope
    headers: Mapping[str, str] | None = scope.get(_SCOPE_KEY)
    if headers is None:
        headers = scope[_SCOPE_KEY] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return headers
