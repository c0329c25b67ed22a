"""Models by family, and how a rank loads its stage of one.

A family is a file with its configuration and its `StageModel`, and a line in `_FAMILIES`
(docs/adding-a-model.md). What families share: `config.py` reads what a checkpoint says about
itself, `weights.py` its files; `decoder.py` is the model that families fill in, of layers that are
there, in `mixture.py` and, below, in `layers.py`; `tensor_parallel.py` says who holds what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from kernels import ops_for
from kernels.packed_linear import Quantization, can_compute
from services.worker.models.config import (
    ModelConfig,
    UnsupportedModel,
    architecture_of,
    read_json_files,
)
from services.worker.models.gemma2 import Gemma2Stage
from services.worker.models.gemma3 import Gemma3Stage
from services.worker.models.gpt2 import GPT2Stage
from services.worker.models.llama import LlamaStage
from services.worker.models.mistral import MistralStage
from services.worker.models.mixtral import MixtralStage
from services.worker.models.opt import OPTStage
from services.worker.models.qwen2 import Qwen2Stage
from services.worker.models.qwen3 import Qwen3Stage
from services.worker.models.qwen3_moe import Qwen3MoeStage
from services.worker.models.stage import StageModel, StagePlace, layer_range
from services.worker.models.tensor_parallel import check_rank
from services.worker.models.weights import (
    CheckpointError,
    CheckpointTensors,
    LoadFormat,
    OnProgress,
    RandomTensors,
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
    "read_config",
]


class _Family(Protocol):
    """A subclass of StageModel, seen as what makes one."""

    @property
    def config_type(self) -> type[ModelConfig]: ...

    def __call__(
        self,
        config: Any,  # of config_type
        place: StagePlace,
        *,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StageModel: ...


_FAMILIES: dict[str, _Family] = {
    "GPT2LMHeadModel": GPT2Stage,
    "Gemma2ForCausalLM": Gemma2Stage,
    "Gemma3ForCausalLM": Gemma3Stage,
    "LlamaForCausalLM": LlamaStage,
    "MistralForCausalLM": MistralStage,
    "MixtralForCausalLM": MixtralStage,
    "OPTForCausalLM": OPTStage,
    "Qwen2ForCausalLM": Qwen2Stage,
    "Qwen3ForCausalLM": Qwen3Stage,
    "Qwen3MoeForCausalLM": Qwen3MoeStage,
}


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`, read as its family's.

    Raises UnsupportedModel, for an architecture that is in no family too.
    """
    config, generation = read_json_files(directory)
    architecture = architecture_of(config)
    if architecture not in _FAMILIES:
        raise UnsupportedModel(f"architecture {architecture!r} is not one of {sorted(_FAMILIES)}")
    return _FAMILIES[architecture].config_type.from_json(config, generation)


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
    load_format: LoadFormat = "safetensors",
    quantization: Quantization = "none",
) -> StageModel:
    """Reads the weights of one rank of one stage, and no others, from a checkpoint.

    With `load_format` "random" they are made up, and `config.json` is all that must be there.
    `dtype` is "auto", "float32" or "bfloat16" (see ModelConfig.resolve_dtype); matrices of layers
    are of `quantization`, embedding, head and experts are not. `on_progress` hears
    the share's bytes read so far and in all, first with 0, then again and again. Raises
    UnsupportedModel for what we do not compute and CheckpointError for files that are not as
    promised, both before any weight has been read.
    """
    config = read_config(directory)
    check_rank(tp_rank, tp_size)
    if not can_compute(quantization, device):
        raise UnsupportedModel(
            f"quantization {quantization} needs the native kernels (`python -m kernels.build`) and "
            "a CPU with AVX-512, BF16 and VNNI"
        )
    family = _FAMILIES[config.architecture]
    element = config.resolve_dtype(dtype)
    place = StagePlace(
        layers=layer_range(config.n_layers, stage_index, n_stages),
        is_first=stage_index == 0,
        is_last=stage_index == n_stages - 1,
        ops=ops_for(device),
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    wanted = WantedTensors(tp_rank, tp_size)
    family(config, place, source=wanted, dtype=element, device=device)
    source: TensorSource
    if load_format == "random":
        source = RandomTensors(
            wanted,
            dtype=element,
            device=device,
            on_progress=on_progress,
            quantization=quantization,
        )
    else:
        source = CheckpointTensors(
            directory,
            wanted,
            dtype=element,
            device=device,
            on_progress=on_progress,
            quantization=quantization,
        )
    return family(config, place, source=source, dtype=element, device=device)
