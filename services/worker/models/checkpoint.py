"""Loads a rank's share of a stage from a checkpoint: first the configuration, then the tensors."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from kernels.weights.linear import Quantization
from services.common.gguf.header import is_gguf
from services.worker.models.config import ModelConfig
from services.worker.models.config_file import read_config, read_gguf_config, read_gguf_header
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.gguf_file import GgufFile
from services.worker.models.registry import build_stage
from services.worker.models.stage import StageModel
from services.worker.models.tensor_files import TensorFiles
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
) -> StageModel:
    """Reads the weights of one rank of one stage, and no other weights, from a checkpoint.

    `model` is a directory or a GGUF file. With `load_format` "random" the tensors are random, and
    only `config.json` must exist. `dtype` is "auto", "float32" or "bfloat16" (see
    ModelConfig.resolve_dtype). For the other arguments and the errors see `build_stage`. The first
    rank of the first stage logs what a user should know about how the weights are read.
    """
    config, files = open_checkpoint(model)
    if (
        config.weight_format is not None
        and config.weight_format.notes
        and not stage_index + tp_rank
    ):
        log.info("%s: %s", model, "; ".join(config.weight_format.notes))
    return build_stage(
        config,
        None if load_format == "random" else files,
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dtype=config.resolve_dtype(dtype),
        device=device,
        on_progress=on_progress,
        quantization=quantization,
    )


def open_checkpoint(model: Path) -> tuple[ModelConfig, TensorFiles]:
    """Returns the configuration and the tensor files of a checkpoint; raises UnsupportedModel."""
    if not is_gguf(model):
        return read_config(model), DirectoryFiles(model)
    header = read_gguf_header(model)
    config = read_gguf_config(header)
    return config, GgufFile(header, config)
