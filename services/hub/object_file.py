"""Fetches one object of a bucket into a file, several pieces at a time, and resumes an earlier
fetch.

    DIGEST            the content, complete and checked
    DIGEST.part       the incomplete content, with each fetched piece at its place
    DIGEST.pieces-N   records of the fetched pieces, which have N bytes each

A piece is recorded only when its bytes are on the disk. So the records are correct even if the
process or the machine stops at any time.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.hub.s3_storage import Bucket, StoredObject
from services.hub.source import SourceError
from services.hub.transfer import TransferProgress

PIECE_BYTES = 16 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_NOTE = re.compile(rb"^([0-9a-f]{8})$", re.M)
_DIRECTORY_BUCKET = "--x-s3"
"""Suffix of the names of directory buckets. ETags in such buckets are not digests of the
content."""


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """An object in a bucket, and the local file into which it is fetched. The file's name is a
    digest of the object's key, size and ETag."""

    bucket: Bucket
    stored: StoredObject
    directory: Path

    @property
    def path(self) -> Path:
        """Path of the file when it is complete."""
        of = self.stored
        named = f"{of.key}\n{of.size}\n{of.etag}"
        return self.directory / hashlib.sha256(named.encode()).hexdigest()

    @property
    def part(self) -> Path:
        """Path of the file while some of its pieces are missing."""
        return self.path.with_suffix(".part")

    @property
    def notes(self) -> Path:
        """Path of the file that records which pieces have been fetched."""
        return self.path.with_suffix(f".pieces-{PIECE_BYTES}")

    def missing(self) -> list[int]:
        """Returns the offsets, in bytes, of the pieces that have not been fetched."""
        if self.path.exists():
            return []
        there = set[int]()
        if self.part.exists() and self.part.stat().st_size == self.stored.size:
            notes = self.notes.read_bytes() if self.notes.exists() else b""
            there = {int(index, 16) * PIECE_BYTES for index in _NOTE.findall(notes)}
        return [begin for begin in range(0, self.stored.size, PIECE_BYTES) if begin not in there]

    def n_bytes(self, begin: int) -> int:
        """Returns the size of the piece that begins at `begin`, in bytes."""
        return min(PIECE_BYTES, self.stored.size - begin)

    def prepare(self) -> None:
        """Creates a file of the object's full size for the pieces, unless there is one.

        A file of another size is replaced, and its pieces are fetched again.
        """
        if self.part.exists() and self.part.stat().st_size == self.stored.size:
            return
        self.notes.unlink(missing_ok=True)
        with self.part.open("wb") as file:
            file.truncate(self.stored.size)

    def fetch_piece(self, begin: int, on_progress: TransferProgress) -> None:
        """Fetches the piece that begins at `begin`, writes it to the file, and records that it is
        complete.

        Raises:
            SourceError: the piece cannot be read.
            OSError: the piece cannot be written.
        """
        with self.part.open("r+b") as file:
            file.seek(begin)
            for chunk in self.bucket.read(self.stored, begin, begin + self.n_bytes(begin)):
                file.write(chunk)
                on_progress(len(chunk))
            file.flush()
            os.fdatasync(file.fileno())
        with self.notes.open("ab", buffering=0) as notes:
            # Each note begins with a line end, so that it is not joined to an incomplete note.
            notes.write(f"\n{begin // PIECE_BYTES:08x}\n".encode())

    def finish(self) -> None:
        """Checks the content of the file against the ETag, and gives the complete file its final
        name.

        If an object was uploaded in parts, or is encrypted with a key of KMS, its ETag is not a
        digest of the content. The content is then not checked.

        Raises:
            SourceError: the content does not match the ETag. The file has been removed.
        """
        if not self._is_as_promised():
            self.notes.unlink(missing_ok=True)
            self.part.unlink()
            raise SourceError(
                f"s3://{self.bucket.name}/{self.stored.key}: came with another content than its "
                "ETag promises; it is fetched anew the next time"
            )
        os.replace(self.part, self.path)
        self.notes.unlink(missing_ok=True)

    def _is_as_promised(self) -> bool:
        if not _MD5.fullmatch(self.stored.etag) or self.bucket.name.endswith(_DIRECTORY_BUCKET):
            return True
        with self.part.open("rb") as file:
            found = hashlib.file_digest(file, _md5).hexdigest()
        return found == self.stored.etag or self.bucket.is_encrypted_by_kms(self.stored.key)


def _md5() -> "hashlib._Hash":
    return hashlib.md5(usedforsecurity=False)
