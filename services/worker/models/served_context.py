"""Determines the length of the context that is served, from the checkpoint's files and the
operator's setting."""

from __future__ import annotations

from services.common.derived import Derived
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.rotary_config import RotaryConfig


def served_context(
    config: ModelConfig, stated: Derived[int], max_model_len: int | None
) -> Derived[int]:
    """Returns the number of tokens of the longest sequence that is served.

    `stated` is the longest context that the files state, and `max_model_len` is the operator's
    setting. Without this setting, a model with "longrope" angles serves its original context. For
    sequences of this length, `transformers` also uses the short factors (see `rope.py`). Raises
    UnsupportedModel for a setting beyond `stated`.
    """
    n_unused = config.n_unused_positions
    if n_unused:
        source = f"{stated.source}, of which {n_unused} are unused"
        stated = Derived(stated.value - n_unused, source)
    if max_model_len is not None:
        if max_model_len > stated.value:
            raise UnsupportedModel(
                f"max_model_len ({max_model_len}) is more than the context of {stated.value} "
                f"tokens ({stated.source})"
            )
        return Derived(max_model_len, "the setting max_model_len")
    original = original_context(config)
    if original is not None and original < stated.value:
        return Derived(
            original,
            "original_max_position_embeddings of longrope, so that the short factors hold; "
            f"set max_model_len for more, up to {stated.value} tokens",
        )
    return stated


def original_context(config: ModelConfig) -> int | None:
    """Returns the number of tokens up to which "longrope" uses its short factors. Returns None for
    a model with other rotary angles."""
    if isinstance(config, RotaryConfig) and config.rope.rope_type == "longrope":
        return config.rope.original_max_position_embeddings
    return None
