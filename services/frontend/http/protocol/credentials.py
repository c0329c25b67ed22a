"""The API key that an HTTP request shows: OpenAI's clients and Anthropic's have a header each."""

from collections.abc import Mapping

AUTHORIZATION = "authorization"
X_API_KEY = "x-api-key"


def shown_in(headers: Mapping[str, str]) -> str | None:
    """Returns the value of the header `authorization`. If there is only a key in `x-api-key`,
    returns the value that `authorization` would have with this key; None without either header."""
    key = headers.get(X_API_KEY)
    return headers.get(AUTHORIZATION, None if key is None else f"Bearer {key}")
