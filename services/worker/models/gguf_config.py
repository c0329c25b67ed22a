"""Reads the configuration of a model from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.context_length import GGUF_STRETCHING
from services.common.derived import Derived
from services.common.gguf.header import GgufHeader, read_header
from services.common.gguf.model_config import frequency_factors, model_config
from services.common.pooling import PoolingSetting
from services.worker.models.config import UnsupportedModel
from services.worker.models.config_json import ReadConfig, parse_with_sources
from services.worker.models.gguf_places import check_places, types_in_words
from services.worker.models.pooling_files import read_pooling
from services.worker.models.rotary_config import RotaryConfig


def read_gguf_header(path: Path) -> GgufHeader:
    """Returns the header of a GGUF file; raises UnsupportedModel for a broken file."""
    try:
        header = read_header(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from error
    check_places(header)
    return header


def read_gguf_config(
    header: GgufHeader, max_model_len: int | None = None, pooling: PoolingSetting = ""
) -> ReadConfig:
    """Returns the configuration in the metadata of a GGUF file. Raises UnsupportedModel if the
    model cannot be served.

    `max_model_len` is the operator's setting for the longest sequence. `pooling` is the setting
    that says how vectors (embeddings or scores) are made, because a GGUF file does not say it.
    """
    try:
        read = parse_with_sources(
            model_config(header), {}, max_model_len=max_model_len, stretching=GGUF_STRETCHING
        )
        factors = frequency_factors(header)
    except UnsupportedModel as error:
        message = str(error).removeprefix("config.json: ")
        raise UnsupportedModel(f"{header.path}: {message}") from error
    except (OSError, ValueError) as error:
        message = str(error).removeprefix(f"{header.path}: ")
        raise UnsupportedModel(f"{header.path}: {message}") from error
    pooled = read_pooling(header.path, {}, pooling, hidden_size=read.config.hidden_size)
    read = replace(read, derived=_gguf_sources(header, read.derived), pooling=pooled)
    if factors is None:
        return read
    config = read.config
    if not isinstance(config, RotaryConfig):
        raise UnsupportedModel(f"{header.path}: rope_freqs.weight of {config.architecture}")
    rope = replace(config.rope, frequency_factors=factors)
    factored = replace(config, rope=rope)
    try:
        factored.check()
    except ValueError as error:
        raise UnsupportedModel(f"{header.path}: {error}") from error
    return replace(read, config=factored)


def _gguf_sources(
    header: GgufHeader, derived: Mapping[str, Derived[Any]]
) -> dict[str, Derived[Any]]:
    """Returns `derived` with origins in the GGUF file: they name the file's metadata instead of
    keys of `config.json`. The value of "quantisation" is replaced by the types of the tensors."""
    metadata = f"metadata of {header.path.name}"
    sourced = {name: Derived(value.value, metadata) for name, value in derived.items()}
    types = Derived(types_in_words(header), "types of the tensors")
    return {**sourced, "quantisation": types}
