"""Reads from `config.json` how a checkpoint is quantised; raises UnsupportedModel.

Each method of quantisation has a file, and `registry.py` lists all methods. As everywhere in
`config.json`, an unknown key is refused unless its value is null, false or empty. Settings of
activations and of stored keys and values are not applied: activations, keys and values keep the
model's element type. Such settings allow a server to round these values, but do not require it.
"""

from services.worker.models.quantization_config.registry import (
    KEYS,
    METHODS,
    OTHER_FILES,
    read_weight_format,
)

__all__ = ["KEYS", "METHODS", "OTHER_FILES", "read_weight_format"]
