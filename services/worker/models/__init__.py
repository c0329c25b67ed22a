"""Models by family, and how a rank gets its share of a stage of one.

A family is a file in `families/` with its configuration and its `StageModel`, and a line in
`registry.py` (docs/adding-a-model.md). Families share the rest: `config.py` has the fields of every
configuration, and `rotary_config.py` the fields of descendants of Llama, whose angles `rope.py`
makes. `decoder.py` is the model that families fill in with the pieces of `decoder_layers.py`,
`layer_forms.py` and `mixture.py`, which are made of the linear layers in `layers.py`. Pieces
describe what is computed with their weights; `stage_program.py` puts the descriptions together to
the program of a stage, which `kernels` runs. `tensor_parallel.py` says which rank holds what.
Tensors are asked for by `weights.py` and come from `checkpoint_tensors.py`, which dequantises by
`quantised/`, or from `random_tensors.py`.

These modules need no file. `checkpoint.py` loads a checkpoint and reads its `config.json` by
`config_file.py`: import it by its own name, since it needs pydantic.
"""

from __future__ import annotations

from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.registry import random_stage
from services.worker.models.safetensors_files import checkpoint_digest
from services.worker.models.stage import StageModel, layer_range
from services.worker.models.tensor_files import CheckpointError

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "StageModel",
    "UnsupportedModel",
    "checkpoint_digest",
    "layer_range",
    "random_stage",
]
