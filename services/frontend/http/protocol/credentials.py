"""The API key that an HTTP request shows: OpenAI's clients and Anthropic's have a header each."""

from collections.abc import Mapping

AUTHORIZATION = "authorization"
X_API_KEY = "x-api-key"


def shown_in(headers: Mapping[str, str]) -> str | None:
    """Returns the value of `authorization`, or the one that it would have with the key of
    `x-api-key`; None where there is neither."""
    key = headers.get(X_API_KEY)
    return headers.get(AUTHORIZATION, None if key is None else f"Bearer {key}")
