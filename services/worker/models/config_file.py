"""Reads the configuration of a model from the files of its checkpoint, or raises the reason why the
model cannot be served.

This file, `config_json.py`, `gguf_config.py` and `quantization_config/` need pydantic. They are
imported only to load a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.gguf.header import is_gguf
from services.common.pooling import Pooling, PoolingSetting
from services.common.tokenizer_files.end_token import end_token
from services.worker.models import quantization_config
from services.worker.models.config import JsonObject, ModelConfig, UnsupportedModel
from services.worker.models.config_json import ReadConfig, parse_with_sources
from services.worker.models.config_keys import shortened
from services.worker.models.gguf_config import read_gguf_config, read_gguf_header
from services.worker.models.pooling_files import MODULES, of_encoder, read_pooling
from services.worker.models.registry import FAMILIES

_MAX_FILE_BYTES = 4 << 20  # the largest files list thousands of classes, in a megabyte


def read_config(model: Path) -> ModelConfig:
    """Returns the configuration of the model in a checkpoint's directory or GGUF file.

    Raises UnsupportedModel if the model cannot be served, or no family implements its architecture.
    """
    if is_gguf(model):
        return read_gguf_config(read_gguf_header(model)).config
    return read_directory_config(model).config


def read_directory_config(
    directory: Path, max_model_len: int | None = None, pooling: PoolingSetting = ""
) -> ReadConfig:
    """Returns the configuration of the model in a checkpoint's directory. Raises UnsupportedModel
    if the model cannot be served.

    `max_model_len` is the operator's setting for the longest sequence. `pooling` is the setting
    that says how vectors (embeddings or scores) are made.
    """
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        named = end_token(directory)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from error
    config = _read_json(directory / "config.json")
    if not any(config.get(key) for key in quantization_config.KEYS):
        config = {**config, **_quantization_beside(directory)}
    read = parse_with_sources(config, generation, named, max_model_len=max_model_len)
    found = read_pooling(directory, config, pooling, hidden_size=read.config.hidden_size)
    return replace(read, pooling=_checked_pooling(found, config, read.config))


def _checked_pooling(
    pooling: Pooling | None, config: JsonObject, parsed: ModelConfig
) -> Pooling | None:
    """Returns `pooling`, completed for encoders and for models without a language-model head,
    neither of which generate tokens. `config` is the content of `config.json`, and `parsed` is the
    configuration that was made of it.

    Raises UnsupportedModel if such a model has no pooling, or has pooling that needs the head.
    """
    named = str((config.get("architectures") or [parsed.architecture])[0])
    has_head = not named.endswith("Model") or named in FAMILIES
    if parsed.is_causal and has_head:
        return pooling
    if pooling is None:
        lacks = "has no head" if parsed.is_causal else "generates no tokens"
        raise UnsupportedModel(
            f"config.json: architecture {shortened(named)} {lacks}, and no {MODULES} or "
            "setting `pooling` says how it makes vectors"
        )
    if not parsed.is_causal:
        return of_encoder(
            pooling,
            token_type_stride=parsed.token_type_stride,
            padding_token_id=parsed.skipped_token_id,
        )
    if pooling.head == "yes-no":
        raise UnsupportedModel(f"pooling: yes-no needs a head, which {shortened(named)} lacks")
    return replace(pooling, generates=False)


def _quantization_beside(directory: Path) -> JsonObject:
    """Reads the quantisation settings from a separate file of the checkpoint. Returns them under
    the key `quantization_config`, as `config.json` would have them, or an empty mapping if there is
    no such file."""
    for name, method in quantization_config.OTHER_FILES.items():
        if (directory / name).exists():
            given = _read_json(directory / name)
            return {"quantization_config": {"quant_method": method, **given}}
    return {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        return bounded_file.read_json_object(path, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from error
