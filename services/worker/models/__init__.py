"""Model families, and how a rank gets its share of a stage of a model.

A family is a file in `families/` with a configuration and a `StageModel`, and a line in
`registry.py` (docs/adding-a-model.md). Families share the other modules: `config.py` has the fields
that every configuration has. `rotary_config.py` has the fields of Llama's descendants, and
`rope.py` computes the angles of their rotary embeddings. `decoder.py` is the model that families
fill in with the layers of `decoder_layers.py`, `layer_forms.py` and `mixture.py`. These layers are
made of the linear layers in `layers.py`. A layer describes what is computed with its weights;
`stage_program.py` joins the descriptions into the program of a stage, which `kernels` runs.
`tensor_parallel.py` determines which rank holds which weights. `weights.py` has the interface
through which a model gets its tensors. The tensors come from `checkpoint_tensors.py`, which
dequantises them with `quantised/`, or from `random_tensors.py`.

All of these modules work without any file. `checkpoint.py` loads a checkpoint and reads
`config.json` with `config_file.py`. This package does not export `checkpoint.py`, because
`config_file.py` needs pydantic: import `checkpoint.py` by its own name.
"""

from __future__ import annotations

from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.directory_files import checkpoint_digest, weights_digest
from services.worker.models.registry import random_stage
from services.worker.models.stage import StageModel
from services.worker.models.stage_place import layer_range
from services.worker.models.tensor_files import CheckpointError

__all__ = [
    "CheckpointError",
    "ModelConfig",
    "StageModel",
    "UnsupportedModel",
    "checkpoint_digest",
    "layer_range",
    "random_stage",
    "weights_digest",
]
