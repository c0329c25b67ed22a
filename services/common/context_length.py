"""The length of the model's context, as the files of the checkpoint state it.

The length bounds the characters of a prompt, and so the memory of a frontend, before any pipeline
serves the model. The pipeline may serve a shorter context.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.gguf.header import is_gguf, read_header

CONFIG = "config.json"

MAX_CONFIG_BYTES = 16 << 20
"""Largest size of a `config.json` in bytes."""

NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
"""Names that families of models give to the length of the context in `config.json`."""


def context_length(model: Path) -> int | None:
    """Returns the number of tokens of the context of a checkpoint's directory or a GGUF file.
    Returns None if the files are not there, are broken, or do not state the number."""
    try:
        if is_gguf(model):
            metadata = read_header(model).metadata
            architecture = metadata.get("general.architecture")
            return _whole(metadata.get(f"{architecture}.context_length"))
        config = bounded_file.read_json_object(model / CONFIG, max_bytes=MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return None
    return _stated(config) or _stated(config.get("text_config"))


def _stated(config: object) -> int | None:
    given: Mapping[str, Any] = config if isinstance(config, dict) else {}
    return next((length for name in NAMES if (length := _whole(given.get(name)))), None)


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
