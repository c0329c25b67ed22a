"""The parts of a request that both clients make alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from orcinus_client.errors import error_of

try:
    from opentelemetry.propagate import inject
except ImportError:  # tracing is an extra
    inject = None  # type: ignore[assignment]

COMPLETIONS = "/completions"
CHAT = "/chat/completions"

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def headers_of(api_key: str | None) -> dict[str, str]:
    """Returns the headers of every request of a client."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def trace_headers() -> dict[str, str]:
    """Returns the headers that name the current span; none without OpenTelemetry."""
    headers: dict[str, str] = {}
    if inject is not None:
        inject(headers)
    return headers


def timeout_of(connect_timeout_s: float, read_timeout_s: float) -> httpx.Timeout:
    """Returns the limits of a connection."""
    return httpx.Timeout(read_timeout_s, connect=connect_timeout_s)


def stripped(base_urls: Sequence[str]) -> list[str]:
    """Returns the base URLs, of which there must be one, without a slash at the end."""
    if not base_urls:
        raise ValueError("a client needs a base URL, such as http://127.0.0.1:8000/v1")
    return [url.rstrip("/") for url in base_urls]


def value_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the JSON object of a response that has been read.

    Raises:
        ApiError: it is an error.
    """
    if not response.is_success:
        raise error_of(response.status_code, response.headers, response.content)
    value: dict[str, Any] = response.json()
    return value
