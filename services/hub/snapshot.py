"""Fetches a checkpoint from the hub into the cache that the hub's library and other programs use.

find out the commit → find missing files → fetch large files, resumably → fetch the other files and
link all files
"""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, set_client_factory, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars

from services.common.url_credentials import without_credentials
from services.hub.authorities import context_with, named_authorities
from services.hub.cache import complete_snapshot, folder_of
from services.hub.errors import explained
from services.hub.name import HubName
from services.hub.proxies import check_proxies
from services.hub.resumable import LargeFile
from services.hub.source import Say, SourceError
from services.hub.transfer import check_space, transfer
from services.hub.turn import turn_of
from services.hub.unreachable import unreachable
from services.hub.wanted_files import MODULES, trouble_with, wanted

N_CONNECTIONS = 4
"""Number of large files that are fetched at the same time."""
API_TIMEOUT_S = 30.0


def fetch(name: HubName, *, say: Say, cache: Path | None = None) -> Path:
    """Fetches a checkpoint into a cache, and returns the checkpoint's directory in the cache.
    Without `cache`, the cache that HF_HOME names is used.

    If several processes want the same checkpoint, one of them fetches it and the others wait.

    Raises:
        SourceError: the checkpoint cannot be fetched, or does not fit on the disk.
    """
    cache = Path(constants.HF_HUB_CACHE) if cache is None else cache
    with explained(name, cache):
        found = complete_snapshot(name, cache)
        try:
            commit, files = _listing(name)
        except (OfflineModeIsEnabled, httpx2.TransportError) as error:
            if found is None:
                raise
            if not constants.HF_HUB_OFFLINE:
                say(f"{unreachable(constants.ENDPOINT, error)}; this is what the cache has")
            return found
        if found is not None and found.name == commit and _has_all(found, files):
            return found
        with turn_of(folder_of(name, cache), say=say):
            return _fetched(name, commit, files, cache)


def connect(environment: Mapping[str, str]) -> None:
    """Makes the library of the hub use the proxies and the authorities that environment variables
    name.

    Raises:
        SourceError: a variable is wrong.
    """
    check_proxies(environment)
    verify = context_with(named_authorities(environment))
    set_client_factory(
        lambda: httpx2.Client(verify=verify, follow_redirects=True, timeout=API_TIMEOUT_S)
    )


def _listing(name: HubName) -> tuple[str, dict[str, RepoFile]]:
    """Returns the commit to which a name refers, and the files to fetch, by their paths in the
    repository.

    Raises:
        SourceError: a variable is wrong, the commit is not known, or the repository lacks files.
    """
    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    connect(os.environ)
    api = HfApi()
    info = api.model_info(name.repository, revision=name.revision, timeout=API_TIMEOUT_S)
    if info.sha is None:
        raise SourceError(
            f"{name.repository}: {without_credentials(constants.ENDPOINT)} does not say which "
            "commit it is"
        )
    tree = api.list_repo_tree(name.repository, revision=info.sha)
    found = {item.path: item for item in tree if isinstance(item, RepoFile)}
    if MODULES in found:
        tree = api.list_repo_tree(name.repository, revision=info.sha, recursive=True)
        found = {item.path: item for item in tree if isinstance(item, RepoFile)}
    files = {path: found[path] for path in wanted({path: it.size for path, it in found.items()})}
    if trouble := trouble_with({path: file.size for path, file in files.items()}):
        raise SourceError(f"{name.repository}: {trouble}")
    return info.sha, files


def _has_all(snapshot: Path, paths: Iterable[str]) -> bool:
    """Returns whether all files of a checkpoint are there. An interrupted fetch may leave a
    checkpoint that could be served, but without its chat template."""
    return all((snapshot / path).is_file() for path in paths)


def _fetched(name: HubName, commit: str, files: dict[str, RepoFile], cache: Path) -> Path:
    blobs = folder_of(name, cache) / "blobs"
    large = [
        LargeFile(name.repository, commit, path, file.lfs.sha256, file.lfs.size)
        for path, file in files.items()
        if file.lfs is not None
    ]
    n_small = sum(file.size for file in files.values() if file.lfs is None)
    check_space(name.repository, blobs, n_small + sum(file.n_missing(blobs) for file in large))
    transfer(
        (partial(file.fetch, blobs) for file in large),
        n_connections=N_CONNECTIONS,
        n_bytes=sum(file.size for file in large),
    )
    disable_progress_bars()  # the remaining files are small
    directory = snapshot_download(
        name.repository,
        revision=name.revision,
        allow_patterns=[path.replace("[", "[[]") for path in files],
        cache_dir=cache,
    )
    return Path(directory)
