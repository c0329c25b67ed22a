"""Random checkpoints of embedding models and rerankers, with the files of `sentence-transformers`,
and the embeddings and scores that `transformers` computes with them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from tests.checkpoints import write_family_checkpoint

_MODES = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
}


def write_embedder(
    directory: Path,
    config: PreTrainedConfig,
    kind: str,
    *,
    normalises: bool = True,
    seed: int = 0,
    is_bare: bool = True,
    **sentence_transformers: Any,
) -> Path:
    """Writes a random embedding model, and returns `directory`. With `is_bare`, the model has no
    head, and the names of its tensors lack the first part, as `AutoModel` writes them. Further
    keyword arguments are keys of `config_sentence_transformers.json`."""
    kinds = AutoModel if is_bare else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kinds.from_config(config).save_pretrained(directory)
    write_pooling(directory, kind, size=config.hidden_size, normalises=normalises)
    file = directory / "config_sentence_transformers.json"
    file.write_text(json.dumps({"similarity_fn_name": "cosine", **sentence_transformers}))
    return directory


def write_pooling(directory: Path, kind: str, *, size: int, normalises: bool = True) -> None:
    """Writes the files that say how the model in `directory` pools."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {mode: mode == _MODES[kind] for mode in _MODES.values()}
    config = {"word_embedding_dimension": size, **modes, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))


def write_reranker(
    directory: Path, config: PreTrainedConfig, *, n_labels: int = 1, seed: int = 0
) -> Path:
    """Writes a random model with a classification head, and returns `directory`."""
    config.num_labels = n_labels
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return directory


def write_encoder(directory: Path, config: PreTrainedConfig, kind: str, **options: Any) -> Path:
    """Writes a random encoder with files for pooling, and returns `directory`. Its norms and biases
    are random, too."""
    write_family_checkpoint(directory, config, kind=AutoModel, **options)
    write_pooling(directory, kind, size=config.hidden_size)
    return directory


def write_cross_encoder(directory: Path, config: PreTrainedConfig) -> Path:
    """Writes a random encoder with a classification head, and returns `directory`."""
    config.num_labels = 1
    return write_family_checkpoint(directory, config, kind=AutoModelForSequenceClassification)


def oracle_vector(directory: Path, token_ids: Sequence[int], kind: str) -> Tensor:
    """Returns the embedding of a prompt by `transformers`, in float32. The embedding is not
    normalised."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        states: Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    if kind == "mean":
        return states.mean(0)
    return states[-1 if kind == "last" else 0]


def oracle_score(
    directory: Path, token_ids: Sequence[int], token_types: Sequence[int] | None = None
) -> float:
    """Returns the logit of a model with a classification head by `transformers`, in float32."""
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(directory, dtype=torch.float32)
    types = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    with torch.inference_mode():
        return float(model(torch.tensor([token_ids]), **types).logits[0, 0])


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the cosine of the angle between two vectors."""
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))
