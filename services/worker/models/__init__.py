"""Models by family, and how a rank comes by its stage of one.

A family is a file with its configuration and its `StageModel`, and a line in `families.py`
(docs/adding-a-model.md). What families share: `config.py` is what configurations have in common,
`weights.py` gives tensors; `decoder.py` is the model that families fill in, of layers that are
there, in `mixture.py` and, below, in `layers.py`; `tensor_parallel.py` says who holds what.

All of it computes without a file. To load a checkpoint is `checkpoint.py`, which reads its
`config.json` by `config_file.py`: import it by its own name, since it alone needs pydantic.
"""

from __future__ import annotations

from services.worker.models.checkpoint_tensors import CheckpointError, checkpoint_digest
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.registry import random_stage
from services.worker.models.stage import StageModel, layer_range

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "StageModel",
    "UnsupportedModel",
    "checkpoint_digest",
    "layer_range",
    "random_stage",
]
