"""Fetches a checkpoint from the hub into the cache that the hub's library and other programs use.

ask which commit it is → look what is missing → large files, resumably → the others and the links
"""

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from services.hub.cache import complete_snapshot, folder_of
from services.hub.errors import HubError, explained
from services.hub.name import HubName
from services.hub.resumable import LargeFile, Progress
from services.hub.turn import turn_of
from services.hub.wanted_files import trouble_with, wanted

N_CONNECTIONS = 4
"""Large files that are fetched at the same time."""
API_TIMEOUT_S = 30.0
_GIB = 1 << 30

Say = Callable[[str], None]
"""A function that is told, in a line, what happens."""


class _Stopped(Exception):
    """Ends the threads of a download that was interrupted."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint that is here."""

    directory: Path
    commit: str


def fetch(name: HubName, *, say: Say, cache: Path | None = None) -> Fetched:
    """Returns a checkpoint's directory in the cache, by default that of HF_HOME, once all is there.

    Of processes that fetch the same, one does, and the others wait for it.

    Raises:
        HubError: it cannot be had, or does not fit on the disk.
    """
    cache = Path(constants.HF_HUB_CACHE) if cache is None else cache
    with explained(name, cache):
        found = complete_snapshot(name, cache)
        try:
            commit, files = _listing(name)
        except (OfflineModeIsEnabled, httpx2.TransportError):
            if found is None:
                raise
            if not constants.HF_HUB_OFFLINE:
                say(f"{constants.ENDPOINT} cannot be reached: this is what the cache has")
            return Fetched(found, found.name)
        if found is not None and found.name == commit:
            return Fetched(found, commit)
        with turn_of(folder_of(name, cache), say=say):
            return _fetched(name, commit, files, cache)


def _listing(name: HubName) -> tuple[str, dict[str, RepoFile]]:
    """Returns the commit that a name means, and the files that are to be fetched."""
    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    api = HfApi()
    info = api.model_info(name.repository, revision=name.revision, timeout=API_TIMEOUT_S)
    if info.sha is None:
        raise HubError(f"{name.repository}: {constants.ENDPOINT} does not say which commit it is")
    tree = api.list_repo_tree(name.repository, revision=info.sha)
    found = {item.path: item for item in tree if isinstance(item, RepoFile)}
    files = {path: found[path] for path in wanted({path: it.size for path, it in found.items()})}
    if trouble := trouble_with({path: file.size for path, file in files.items()}):
        raise HubError(f"{name.repository}: {trouble}")
    return info.sha, files


def _fetched(name: HubName, commit: str, files: dict[str, RepoFile], cache: Path) -> Fetched:
    blobs = folder_of(name, cache) / "blobs"
    large = [
        LargeFile(name.repository, commit, path, file.lfs.sha256, file.lfs.size)
        for path, file in files.items()
        if file.lfs is not None
    ]
    n_small = sum(file.size for file in files.values() if file.lfs is None)
    _check_space(name, blobs, n_small + sum(file.n_missing(blobs) for file in large))
    _fetch_large(large, blobs)
    disable_progress_bars()  # what is left are small files
    directory = snapshot_download(
        name.repository,
        revision=name.revision,
        allow_patterns=[path.replace("[", "[[]") for path in files],
        cache_dir=cache,
    )
    return Fetched(Path(directory), Path(directory).name)


def _check_space(name: HubName, directory: Path, n_bytes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    n_free = shutil.disk_usage(directory).free
    if n_bytes > n_free:
        raise HubError(
            f"{name.repository}: {n_bytes / _GIB:.2f} GiB are to be fetched, and "
            f"{n_free / _GIB:.2f} GiB are free in {directory}"
        )


def _fetch_large(files: list[LargeFile], blobs: Path) -> None:
    stopping = threading.Event()
    with _bar(sum(file.size for file in files)) as advance:

        def on_progress(n_bytes: int) -> None:
            if stopping.is_set():
                raise _Stopped
            advance(n_bytes)

        pool = ThreadPoolExecutor(N_CONNECTIONS)
        fetching = [pool.submit(file.fetch, blobs, on_progress) for file in files]
        try:
            for each in fetching:
                each.result()
        finally:  # after an error or Ctrl-C, threads end with their next bytes, and nobody waits
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _bar(n_bytes: int) -> Iterator[Progress]:
    """A progress bar on standard error, if that is a terminal; else a line for each tenth."""
    if sys.stderr.isatty():
        with tqdm(desc="fetching", unit="B", unit_scale=True, total=n_bytes, leave=False) as bar:

            def advance(n_bytes: int) -> None:
                bar.update(n_bytes)

            yield advance
    else:
        yield _Tenths(n_bytes).add


class _Tenths:
    """Says in lines how far a download is, for logs."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._n_done = 0
        self._n_said = 0
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Adds bytes that have come."""
        with self._lock:
            self._n_done += n_bytes
            tenths = 10 * self._n_done // max(self._n_bytes, 1)
            if tenths > self._n_said:
                self._n_said = tenths
                sys.stderr.write(
                    f"fetched {self._n_done / _GIB:.2f} of {self._n_bytes / _GIB:.2f} GiB\n"
                )
                sys.stderr.flush()
