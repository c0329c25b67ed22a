"""The sizes of a checkpoint that the tuner needs before any rank has loaded it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.context_length import NAMES, default_context
from services.common.gguf.header import is_gguf, read_header
from services.common.gguf.model_config import model_config

MAX_CONFIG_BYTES = 2**20
N_ELEMENT_BYTES = 2
"""Number of bytes of a weight in memory. Most models are loaded as bfloat16."""
KEPT_BITS = {
    2: 4.5, 3: 5, 6: 8.5, 7: 9, 8: 8.5, 10: 6, 11: 5, 12: 5, 13: 9, 14: 9, 16: 4.5, 17: 5,
    18: 4.5, 19: 5, 20: 4.5, 21: 4.5, 22: 5, 23: 4.5, 29: 8, 34: 4.125, 35: 4.125, 39: 4.5, 40: 5,
}  # fmt: skip
"""Bits of memory for one element, including its share of the scales, for each type of GGUF blocks
that stays quantised. The keys are GGUF's numbers of the types."""
KEPT_METHODS = frozenset(("gptq", "awq", "auto-round", "intel/auto-round"))
"""Names of quantisation methods whose weights stay packed in memory."""
LAYERS = ("num_hidden_layers", "n_layer")
HEADS = ("num_key_value_heads", "num_attention_heads", "n_head")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its `config.json` or the header of its GGUF file states."""

    n_layers: int
    n_kv_heads: int
    vocab_size: int
    max_model_len: int
    n_weight_bytes: int

    @classmethod
    def read(cls, model: Path) -> "ModelShape":
        """Reads a checkpoint's sizes.

        Raises:
            ValueError: a size is missing. The message names the size.
        """
        if is_gguf(model):
            header = read_header(model)
            config = model_config(header)
            n_bits = sum(
                tensor.n_elements * KEPT_BITS.get(tensor.type, 8 * N_ELEMENT_BYTES)
                for tensor in header.tensors.values()
            )
            n_weight_bytes = int(n_bits / 8)
        else:
            config = bounded_file.read_json_object(
                model / "config.json", max_bytes=MAX_CONFIG_BYTES
            )
            found = [*model.glob("*.safetensors")] or [*model.glob("pytorch_model*.bin")]
            n_file_bytes = sum(path.stat().st_size for path in found)
            n_weight_bytes = n_file_bytes * 8 * N_ELEMENT_BYTES // _bits(config)
        text_config = config.get("text_config")
        sizes = {**config, **(text_config if isinstance(text_config, dict) else {})}

        def size(*keys: str) -> int:
            for key in keys:
                if isinstance(value := sizes.get(key), int) and value > 0:
                    return value
            raise ValueError(f"model: config.json has no {' or '.join(keys)}")

        return cls(
            n_layers=size(*LAYERS),
            n_kv_heads=size(*HEADS),
            vocab_size=size("vocab_size"),
            max_model_len=default_context(sizes) or size(*NAMES),
            n_weight_bytes=n_weight_bytes,
        )


def _bits(config: Mapping[str, Any]) -> int:
    """Returns the number of bits per weight with which `ModelShape.read` computes the memory of all
    weights from the size of their files. If weights are dequantised when they are loaded, this is
    the number of bits that a weight has in the files. If they stay quantised in memory, this is `8
    * N_ELEMENT_BYTES`: then the computed memory equals the size of the files."""
    plain = 8 * N_ELEMENT_BYTES
    quantization = config.get("quantization_config")
    if config.get("quantization") or not isinstance(quantization, dict):
        return plain  # MLX's weights stay packed
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        return 4 if quantization.get("load_in_4bit") else plain
    if "quant_algo" in quantization:
        return plain if quantization["quant_algo"] == "NVFP4" else 8
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        return max((_bits_of_group(each) for each in weights if isinstance(each, dict)), default=8)
    found = quantization.get("bits", 4 if method == "mxfp4" else 8)
    is_kept = method in KEPT_METHODS and not quantization.get("desc_act")
    return found if isinstance(found, int) and found > 0 and not is_kept else plain


def _bits_of_group(weights: Mapping[str, Any]) -> int:
    """Returns the number of bits of a weight, as `_bits` does, for one group of modules in the
    format compressed-tensors."""
    found = weights.get("num_bits", 8)
    is_packed = weights.get("type", "int") == "int" or found == 4
    is_kept = is_packed and not weights.get("actorder")
    return found if isinstance(found, int) and found > 0 and not is_kept else 8 * N_ELEMENT_BYTES
