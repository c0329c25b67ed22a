"""Models by family, and how a rank loads its stage of one.

A new family is a file with its `StageModel` and a line in `_FAMILIES`; what a checkpoint says about
itself is `config.py`, its files `weights.py`, layers that families share `layers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from kernels import ops_for
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.llama import LlamaStage
from services.worker.models.stage import StageModel, StagePlace, layer_range
from services.worker.models.weights import (
    CheckpointError,
    CheckpointTensors,
    OnProgress,
    TensorSource,
    WantedTensors,
    checkpoint_digest,
)

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "StageModel",
    "UnsupportedModel",
    "checkpoint_digest",
    "layer_range",
    "load_stage",
]


class _Family(Protocol):
    def __call__(
        self,
        config: ModelConfig,
        place: StagePlace,
        *,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StageModel: ...


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": LlamaStage,
}


def load_stage(
    directory: Path,
    *,
    stage_index: int,
    n_stages: int,
    tp_rank: int,
    tp_size: int,
    dtype: str,
    device: torch.device,
    on_progress: OnProgress,
) -> StageModel:
    """Reads the weights of one rank of one stage, and no others, from a checkpoint.

    `dtype` is "auto", "float32" or "bfloat16" (see ModelConfig.resolve_dtype). `on_progress` hears
    the checkpoint's bytes read so far and in all, first with 0, then after each tensor. Raises
    UnsupportedModel for what we do not compute and CheckpointError for files that are not as
    promised, both before any weight has been read.
    """
    config = ModelConfig.from_directory(directory)
    if config.architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not one of {sorted(_FAMILIES)}"
        )
    if (tp_rank, tp_size) != (0, 1):
        raise UnsupportedModel(
            f"tp_rank {tp_rank} of tp_size {tp_size}: no sharding yet, only 0 of 1"
        )
    family = _FAMILIES[config.architecture]
    element = config.resolve_dtype(dtype)
    place = StagePlace(
        layers=layer_range(config.n_layers, stage_index, n_stages),
        is_first=stage_index == 0,
        is_last=stage_index == n_stages - 1,
        ops=ops_for(device),
    )
    wanted = WantedTensors()
    family(config, place, source=wanted, dtype=element, device=device)
    with CheckpointTensors(
        directory, wanted, dtype=element, device=device, on_progress=on_progress
    ) as source:
        return family(config, place, source=source, dtype=element, device=device)
