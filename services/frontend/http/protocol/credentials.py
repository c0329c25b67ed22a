"""Finds the API key of an HTTP request. OpenAI's clients send the key in the header
`authorization`, and Anthropic's clients in `x-api-key`."""

from collections.abc import Mapping

AUTHORIZATION = "authorization"
X_API_KEY = "x-api-key"


def shown_in(headers: Mapping[str, str]) -> str | None:
    """Returns the credentials of a request in the form of the header `authorization`. A key in the
    header `x-api-key` is converted to that form. Returns None if the request has neither header."""
    key = headers.get(X_API_KEY)
    return headers.get(AUTHORIZATION, None if key is None else f"Bearer {key}")
