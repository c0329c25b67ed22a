"""The exceptions of failed calls to the Kubernetes API, and an explanation of each in one line."""

import json

import aiohttp
from kubernetes.aio import client, config

FAILURES = (
    client.ApiException,
    config.ConfigException,  # a token file that is being replaced
    aiohttp.ClientError,
    OSError,  # TimeoutError among them
    ValueError,  # a malformed answer: errors of JSON and pydantic are ValueErrors
)
"""Exceptions of a call that failed."""


def status_of(error: Exception) -> int | None:
    """Returns the HTTP status of a failed call. Returns None if there was no answer."""
    return error.status if isinstance(error, client.ApiException) else None


def explain(action: str, error: Exception) -> str:
    """Returns one line that says why `action` failed. It includes the message of the API server, if
    there is one, because that names the account and the missing right."""
    if not isinstance(error, client.ApiException):
        return f"cannot {action}: {str(error) or type(error).__name__}"
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, LookupError, TypeError):
        message = error.reason
    return f"cannot {action}: {error.status} {message}"
