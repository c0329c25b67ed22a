"""Explanations of the errors that occur while a checkpoint is fetched from the hub."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.common.url_credentials import without_credentials
from services.hub.name import HubName
from services.hub.source import SourceError
from services.hub.unreachable import unreachable


@contextmanager
def explained(name: HubName, cache: Path) -> Iterator[None]:
    """Converts errors of the hub and of the hub's library to SourceError, with a message that names
    the repository."""
    try:
        yield
    except (*EXPLAINED, OSError) as error:
        raise SourceError(f"{name.repository}: {_explanation(name, cache, error)}") from error


EXPLAINED = (httpx2.HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled)


def _explanation(name: HubName, cache: Path, error: Exception) -> str:
    endpoint = without_credentials(constants.ENDPOINT)
    match error:
        case GatedRepoError():
            return (
                f"is gated: accept its terms at {endpoint}/{name.repository}, and set HF_TOKEN to "
                "a token of that account"
            )
        case RepositoryNotFoundError():
            return f"no such repository at {endpoint}, or a private one that HF_TOKEN does not open"
        case RevisionNotFoundError():
            return f"has no revision {name.revision!r}"
        case HfHubHTTPError():
            return f"{endpoint} answers with HTTP status {error.response.status_code}"
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"revision {name.revision!r} is not complete in {cache}, and "
                "HF_HUB_OFFLINE forbids to fetch it"
            )
        case httpx2.UnsupportedProtocol():
            return f"HF_ENDPOINT: {endpoint!r} must be like https://HOST"
        case LocalEntryNotFoundError() | httpx2.TransportError():
            return (
                f"{unreachable(endpoint, error)}; revision {name.revision!r} is not complete in "
                f"{cache}"
            )
        case OSError(errno=errno.ENOSPC):
            return "the disk is full; what has been fetched stays, and the next call goes on"
        case _:
            return str(error) or type(error).__name__
