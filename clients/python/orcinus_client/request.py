"""The parts of HTTP requests and answers that both clients have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from orcinus_client.errors import ConnectionLost, TimedOut, UnexpectedAnswer, error_of

try:
    from opentelemetry.propagate import inject
except ImportError:  # tracing is an extra
    inject = None  # type: ignore[assignment]


def connection_options(
    api_key: str | None, *, connect_timeout_s: float, read_timeout_s: float
) -> dict[str, Any]:
    """Returns the options of the clients of httpx: the headers of every request, and the limits of
    connections."""
    return {
        "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        "timeout": httpx.Timeout(read_timeout_s, connect=connect_timeout_s),
    }


def answer_timeout(connect_timeout_s: float, answer_timeout_s: float | None) -> httpx.Timeout:
    """Returns the timeouts of a connection for an answer that is not streamed; such an answer has
    no byte before it is computed completely."""
    return httpx.Timeout(connect_timeout_s, read=answer_timeout_s)


def trace_headers() -> dict[str, str]:
    """Returns the headers that name the current span; none without OpenTelemetry."""
    headers: dict[str, str] = {}
    if inject is not None:
        inject(headers)
    return headers


def stripped(base_urls: Sequence[str]) -> list[str]:
    """Returns the base URLs without slashes at their ends; raises ValueError for no base URL."""
    if not base_urls:
        raise ValueError("a client needs a base URL, such as http://127.0.0.1:8000/v1")
    return [url.rstrip("/") for url in base_urls]


@contextmanager
def connection_to(url: str, *, is_computed: bool = False) -> Iterator[None]:
    """Turns errors of httpx in the block into errors of this package.

    Raises:
        ConnectionLost: the connection to the URL cannot be made, or breaks off.
        TimedOut: a whole answer that `is_computed` takes too long.
        UnexpectedAnswer: the answer is wrongly compressed.
    """
    try:
        yield
    except httpx.ReadTimeout as error:
        if is_computed:
            raise TimedOut(f"{url}: no answer in the time that it may take") from error
        raise ConnectionLost(f"{url}: nothing came for too long") from error
    except httpx.DecodingError as error:
        raise UnexpectedAnswer(f"{url}: {error}") from error
    except httpx.TransportError as error:
        raise ConnectionLost(f"{url}: {error or type(error).__name__}") from error


def check_stream(response: httpx.Response) -> None:
    """Raises UnexpectedAnswer if a successful response is not a stream of events."""
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise UnexpectedAnswer(f"{response.url}: {kind or 'no type'} in place of a stream")


def value_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the JSON object of a response that has been read.

    Raises:
        ApiError: the response is an error.
        UnexpectedAnswer: the response is not a JSON object.
    """
    if not response.is_success:
        raise error_of(response.status_code, response.headers, response.content)
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UnexpectedAnswer(f"{response.url}: no JSON object: {response.text[:200]}")
    return value
