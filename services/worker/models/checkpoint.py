"""Loads a rank's share of a stage from a checkpoint: first the configuration, then the tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.weights.linear import Activations, Quantization
from services.common.derived import Derived
from services.common.gguf.header import is_gguf
from services.common.pooling import Pooling, PoolingSetting
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.config import ModelConfig
from services.worker.models.config_file import read_directory_config
from services.worker.models.directory_files import DirectoryFiles, files_digest
from services.worker.models.gguf_config import read_gguf_config, read_gguf_header
from services.worker.models.registry import build_stage
from services.worker.models.stage import StageModel
from services.worker.models.stored_head import EMBEDDING, stored_head
from services.worker.models.tensor_files import TensorFiles
from services.worker.models.weight_cache import WeightCache
from services.worker.models.weights import LoadFormat, OnProgress

log = logging.getLogger(__name__)


def load_stage(
    model: Path,
    *,
    stage_index: int,
    n_stages: int,
    tp_rank: int,
    tp_size: int,
    dtype: str,
    device: torch.device,
    on_progress: OnProgress,
    load_format: LoadFormat = "safetensors",
    quantization: Quantization = "none",
    activations: Activations = "rounded",
    max_model_len: int | None = None,
    cache: WeightCache | None = None,
    adapters: Sequence[Adapter] = (),
    takes_adapters: bool = False,
    pooling: PoolingSetting = "",
) -> StageModel:
    """Reads the weights of one rank of one stage, and no other weights, from a checkpoint.

    `model` is a directory or a GGUF file. With `load_format` "random" the tensors are random, and
    only `config.json` must exist. `dtype` is "auto", "float32" or "bfloat16" (see
    ModelConfig.resolve_dtype). `max_model_len` is the length of the longest sequence. By default
    `open_checkpoint` derives it. `pooling` is the setting that says how vectors (embeddings or
    scores) are made. `cache` keeps packed quantised matrices for the next start; it is used on a
    CPU only. For the other arguments and the errors see `build_stage`. The first rank of the first
    stage logs notes about how the weights are read.
    """
    opened = open_checkpoint(
        model, load_format=load_format, max_model_len=max_model_len, pooling=pooling
    )
    config = opened.config
    if (
        config.weight_format is not None
        and config.weight_format.notes
        and not stage_index + tp_rank
    ):
        log.info("%s: %s", model, "; ".join(config.weight_format.notes))
    element = config.resolve_dtype(dtype)
    cached = None
    if cache is not None and device.type == "cpu" and load_format != "random":
        place = f"stage {stage_index} of {n_stages}, rank {tp_rank} of {tp_size}"
        form = f"{element} {quantization} {activations}"
        cached = cache.share(files_digest(model), config.fingerprint(), place, form)
    return build_stage(
        config,
        None if load_format == "random" else opened.files,
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dtype=element,
        device=device,
        on_progress=on_progress,
        quantization=quantization,
        activations=activations,
        cached=cached,
        adapters=adapters,
        takes_adapters=takes_adapters,
        pooling=opened.pooling,
    )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The configuration and the tensor files of a checkpoint, and the origin of each derived value.

    The keys of `derived` are the keys of `ReadConfig.derived`, and "head" unless weights are
    random or the model is an encoder, which has no head for tokens.
    """

    config: ModelConfig
    files: TensorFiles
    derived: Mapping[str, Derived[Any]]
    ignored_keys: tuple[str, ...] = ()  # of config.json, see ReadConfig
    pooling: Pooling | None = None  # None: the model makes no vectors


def open_checkpoint(
    model: Path,
    *,
    load_format: LoadFormat = "safetensors",
    max_model_len: int | None = None,
    pooling: PoolingSetting = "",
) -> Checkpoint:
    """Returns the configuration and the tensor files of a checkpoint; raises UnsupportedModel.

    If the configuration says that head and embedding share a matrix, the tensor files are searched
    for a separate head. With `load_format` "random" no tensor files need to exist. `max_model_len`
    is the operator's setting for the longest sequence, in tokens. `pooling` is the setting that
    says how vectors (embeddings or scores) are made.
    """
    files: TensorFiles
    if is_gguf(model):
        # The package `gguf` takes up to a second to import, which other checkpoints do not need.
        from services.worker.models.gguf_file import GgufFile

        header = read_gguf_header(model)
        read = read_gguf_config(header, max_model_len, pooling)
        files = GgufFile(header, read.config)
    else:
        read = read_directory_config(model, max_model_len, pooling)
        files = DirectoryFiles(model)
    if load_format == "random" or not read.config.is_causal:
        return Checkpoint(read.config, files, read.derived, read.ignored_keys, read.pooling)
    head = stored_head(read.config, files)
    config = replace(read.config, tie_word_embeddings=head.value == EMBEDDING)
    derived = {**read.derived, "head": head}
    return Checkpoint(config, files, derived, read.ignored_keys, read.pooling)
