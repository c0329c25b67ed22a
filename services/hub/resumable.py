"""Fetches one large file from the hub into the hub's cache, and resumes an earlier fetch.

The library of the hub fetches each file from its start in a new process. This module keeps an
incomplete file next to the blobs of the cache, under the SHA-256 of the full content. The file
becomes the blob when it is complete and its digest matches.
"""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from services.hub.source import SourceError
from services.hub.transfer import TransferProgress

TIMEOUT_S = 30.0
"""Seconds without a received byte after which a connection counts as lost."""
MAX_FAILURES = 5
"""Number of consecutive connections without a received byte after which the fetch of a file
fails."""
PAUSE_S = 1.0
"""Seconds of pause after a connection that delivered no byte."""


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A large file of a repository at a commit. The hub identifies the content of the file by its
    SHA-256."""

    repository: str
    commit: str
    path: str
    sha256: str
    size: int

    def n_missing(self, blobs: Path) -> int:
        """Returns the number of bytes of the file that have not been fetched into the directory
        `blobs`."""
        if (blobs / self.sha256).exists():
            return 0
        part = blobs / f"{self.sha256}.part"
        return self.size - min(part.stat().st_size if part.exists() else 0, self.size)

    def fetch(self, blobs: Path, on_progress: TransferProgress) -> None:
        """Fetches the content of the file, unless the content is already complete. `blobs` is the
        directory `blobs` of the repository in the cache.

        Raises:
            SourceError: the digest of the content does not match, or the hub sends no more bytes.
            httpx2.HTTPError: the hub refuses the request, or cannot be reached.
            OSError: the content cannot be written.
        """
        blob = blobs / self.sha256
        if blob.exists():
            on_progress(self.size)
            return
        blobs.mkdir(parents=True, exist_ok=True)
        part = blobs / f"{self.sha256}.part"
        with part.open("ab") as file:
            if file.tell() > self.size:
                file.truncate(0)
            on_progress(file.tell())
            self._read_all(file, on_progress)
        self._check(part)
        os.replace(part, blob)

    def _read_all(self, file: BinaryIO, on_progress: TransferProgress) -> None:
        """Appends the missing bytes to the file, over several connections if necessary."""
        n_failures = 0
        while (begin := file.tell()) < self.size:
            lost: httpx2.TransportError | None = None
            try:
                self._read_on(file, on_progress)
            except httpx2.TransportError as error:
                lost = error
            if file.tell() > begin:
                n_failures = 0
                continue
            n_failures += 1
            if n_failures == MAX_FAILURES:
                raise lost or SourceError(f"{self.repository}: {self.path} does not go on")
            time.sleep(PAUSE_S)

    def _read_on(self, file: BinaryIO, on_progress: TransferProgress) -> None:
        """Opens one connection, and appends the bytes that it delivers to the file. If the server
        sends the whole file again, the file is emptied first."""
        url = hf_hub_url(self.repository, self.path, revision=self.commit)
        location = get_hf_file_metadata(url, timeout=TIMEOUT_S).location
        begin = file.tell()
        # The token is sent to the hub only, not to the storage that the hub points to.
        own = httpx2.URL(location).host == httpx2.URL(url).host
        headers = {**(build_hf_headers() if own else {}), "Range": f"bytes={begin}-"}
        headers["Accept-Encoding"] = "identity"
        with get_session().stream(
            "GET", location, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            if begin and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                on_progress(-begin)  # the answer is the whole file
                file.seek(0)
                file.truncate()
            for piece in response.iter_raw():
                file.write(piece)
                file.flush()
                on_progress(len(piece))

    def _check(self, part: Path) -> None:
        """Compares the SHA-256 of the file `part` with the SHA-256 that the hub announced. If they
        differ, removes the file and raises SourceError."""
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            part.unlink()
            raise SourceError(
                f"{self.repository}: {self.path} came with another content than promised; "
                "it is fetched anew the next time"
            )
