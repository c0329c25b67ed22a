"""What the tuner must know of a checkpoint before any rank has read it."""

from dataclasses import dataclass
from pathlib import Path

from services.common import bounded_file

MAX_CONFIG_BYTES = 2**20
LAYERS = ("num_hidden_layers", "n_layer")
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx")
HEADS = ("num_key_value_heads", "num_attention_heads", "n_head")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, from its `config.json`."""

    n_layers: int
    n_kv_heads: int
    vocab_size: int
    max_model_len: int
    n_weight_bytes: int

    @classmethod
    def read(cls, directory: Path) -> "ModelShape":
        """Reads a checkpoint's sizes.

        Raises:
            ValueError: one of them is not there; says which.
        """
        config = bounded_file.read_json_object(
            directory / "config.json", max_bytes=MAX_CONFIG_BYTES
        )
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
            max_model_len=size(*CONTEXTS),
            n_weight_bytes=sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        )
