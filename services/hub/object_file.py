"""One object of a bucket into a file, in pieces at the same time: a piece that an earlier call has
fetched is not fetched again.

    KEY               the content, whole and checked
    KEY.part          its pieces, each in its place
    KEY.pieces-N      which pieces of N bytes are in it

A piece is noted once the disk has it, so that the notes hold after any end, of the process or
of the machine.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.hub.s3_storage import Bucket, StoredObject
from services.hub.source import SourceError
from services.hub.transfer import Progress

PIECE_BYTES = 16 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_NOTE = re.compile(rb"^([0-9a-f]{8})$", re.M)
_DIRECTORY_BUCKET = "--x-s3"
"""How the names of those buckets end whose ETags are no digests of anything."""


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """Where an object is, and becomes a file: its name is a digest of its key, size and ETag."""

    bucket: Bucket
    stored: StoredObject
    directory: Path

    @property
    def path(self) -> Path:
        """The file, once it is complete."""
        of = self.stored
        named = f"{of.key}\n{of.size}\n{of.etag}"
        return self.directory / hashlib.sha256(named.encode()).hexdigest()

    @property
    def part(self) -> Path:
        """The file until then."""
        return self.path.with_suffix(".part")

    @property
    def notes(self) -> Path:
        """Which pieces are there."""
        return self.path.with_suffix(f".pieces-{PIECE_BYTES}")

    def missing(self) -> list[int]:
        """Returns the first byte of each piece that is not here yet."""
        if self.path.exists():
            return []
        there = set[int]()
        if self.part.exists() and self.part.stat().st_size == self.stored.size:
            notes = self.notes.read_bytes() if self.notes.exists() else b""
            there = {int(index, 16) * PIECE_BYTES for index in _NOTE.findall(notes)}
        return [begin for begin in range(0, self.stored.size, PIECE_BYTES) if begin not in there]

    def n_bytes(self, begin: int) -> int:
        """Returns the size of the piece that begins there."""
        return min(PIECE_BYTES, self.stored.size - begin)

    def prepare(self) -> None:
        """Makes room for the pieces, and forgets those of which nobody knows where they were."""
        if self.part.exists() and self.part.stat().st_size == self.stored.size:
            return
        self.notes.unlink(missing_ok=True)
        with self.part.open("wb") as file:
            file.truncate(self.stored.size)

    def fetch_piece(self, begin: int, on_progress: Progress) -> None:
        """Puts a piece in its place, and notes it.

        Raises:
            SourceError: it cannot be had.
            OSError: it cannot be written.
        """
        with self.part.open("r+b") as file:
            file.seek(begin)
            for chunk in self.bucket.read(self.stored, begin, begin + self.n_bytes(begin)):
                file.write(chunk)
                on_progress(len(chunk))
            file.flush()
            os.fdatasync(file.fileno())
        with self.notes.open("ab", buffering=0) as notes:
            # A note that was cut off ends with the line that the next begins with.
            notes.write(f"\n{begin // PIECE_BYTES:08x}\n".encode())

    def finish(self) -> None:
        """Makes the pieces the file.

        Raises:
            SourceError: they are not what the ETag promises. Those of objects that were put in
                several parts, or are encrypted with a key of KMS, promise nothing.
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
