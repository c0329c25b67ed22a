"""The parts of an HTTP request, and of its answer, that both clients make and read alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from orcinus_client.errors import ConnectionLost, error_of

try:
    from opentelemetry.propagate import inject
except ImportError:  # tracing is an extra
    inject = None  # type: ignore[assignment]


def connection_options(
    api_key: str | None, *, connect_timeout_s: float, read_timeout_s: float
) -> dict[str, Any]:
    """Returns the options of httpx's clients: the headers of every request, and the limits of
    connections."""
    return {
        "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        "timeout": httpx.Timeout(read_timeout_s, connect=connect_timeout_s),
    }


def trace_headers() -> dict[str, str]:
    """Returns the headers that name the current span; none without OpenTelemetry."""
    headers: dict[str, str] = {}
    if inject is not None:
        inject(headers)
    return headers


def stripped(base_urls: Sequence[str]) -> list[str]:
    """Returns the base URLs, of which there must be one, without a slash at the end."""
    if not base_urls:
        raise ValueError("a client needs a base URL, such as http://127.0.0.1:8000/v1")
    return [url.rstrip("/") for url in base_urls]


@contextmanager
def connection_to(url: str) -> Iterator[None]:
    """Raises ConnectionLost where a connection to a URL breaks off, or cannot be made."""
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionLost(f"{url}: {error or type(error).__name__}") from error


def value_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the JSON object of a response that has been read.

    Raises:
        ApiError: it is an error.
    """
    if not response.is_success:
        raise error_of(response.status_code, response.headers, response.content)
    value: dict[str, Any] = response.json()
    return value
