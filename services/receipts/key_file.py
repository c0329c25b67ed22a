"""Reads the file with the keys that sign receipts, and reads it again when it changes."""

from pathlib import Path

from services.common import bounded_file
from services.common.mounted import Mounted
from services.receipts.keys import SigningKeys

MAX_FILE_BYTES = 2**16
"""Largest size of a key file in bytes. A key takes 120 bytes."""


class KeyFile:
    """The keys that sign receipts, from a file. The file is read again when it changes, for example
    when Kubernetes updates a mounted Secret."""

    def __init__(self, path: Path) -> None:
        """Reads the file for the first time.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file has no keys that can sign; the message names the file.
        """
        self._path = path
        self._keys = Mounted(path, self._read, self._parse)

    @property
    def latest(self) -> SigningKeys:
        """The keys of the newest content of the file that was valid."""
        return self._keys.latest()

    def _read(self) -> bytes:
        return bounded_file.read_bytes(self._path, max_bytes=MAX_FILE_BYTES)

    def _parse(self, content: bytes) -> SigningKeys:
        try:
            return SigningKeys.parse(content)
        except ValueError as error:
            raise ValueError(f"{self._path} {error}") from error
