"""Gemma 1, 2 and 3. In GGUF files, 1 has been added to the scales of their norms."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import (
    HEAD_NORMS,
    MLP,
    OUTSIDE,
    PRE_NORMS,
    PROJECTIONS,
    SANDWICH_NORMS,
    plus_one,
)

_CONSTANTS = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_DEFAULT_BASE, _DEFAULT_LOCAL_BASE = 1_000_000.0, 10_000.0  # rotary bases of Gemma 3


def window_layers(said: Metadata, config: Config) -> Config:
    """Returns the configuration key `layer_types`, which says for each layer whether its attention
    has a window. Returns an empty configuration if the file does not list the layers."""
    if not _lists(said):
        return {}
    windows = said.per_layer("attention.sliding_window_pattern", config["num_hidden_layers"]) or []
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in windows]}


def refuse_other_base(said: Metadata) -> None:
    """Raises ValueError if layers with a window have another rotary base than other layers."""
    local, base = said.number("rope.freq_base_swa"), said.number("rope.freq_base")
    if local is not None and local != base:
        raise ValueError(f"{said.name('rope.freq_base_swa')} is {local}, and freq_base is {base}")


def _scalar(config: Config, *, large: int) -> Config:
    """Returns the configuration key `query_pre_attn_scalar`: attention scores are divided by the
    square root of its value. The value is the size of a head; in the model with `large` layers, it
    is the hidden size divided by the number of heads."""
    scalar = config.get("head_dim", 256)
    if config["num_hidden_layers"] == large:
        scalar = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {"query_pre_attn_scalar": scalar}


def _gemma2(said: Metadata, config: Config) -> Config:
    refuse_other_base(said)
    return {**_scalar(config, large=46), **window_layers(said, config)}


def _gemma3(said: Metadata, config: Config) -> Config:
    local = said.number("rope.freq_base_swa")
    pattern = said.integer("attention.sliding_window_pattern") if not _lists(said) else None
    return {
        **_scalar(config, large=62),
        **window_layers(said, config),
        **({} if pattern is None else {"sliding_window_pattern": pattern}),
        "rope_theta": config.get("rope_theta", _DEFAULT_BASE),
        "rope_local_base_freq": _DEFAULT_LOCAL_BASE if local is None else float(local),
    }


def _lists(said: Metadata) -> bool:
    return hasattr(said.value("attention.sliding_window_pattern"), "__len__")


GEMMA = Architecture(
    family="GemmaForCausalLM",
    tensors=plus_one({**OUTSIDE, **PRE_NORMS, **PROJECTIONS, **MLP}),
    constants=_CONSTANTS,
)
GEMMA2 = Architecture(
    family="Gemma2ForCausalLM",
    tensors=plus_one({**OUTSIDE, **SANDWICH_NORMS, **PROJECTIONS, **MLP}),
    keys={**_WINDOW, **_CAPS},
    others=frozenset(("attention.sliding_window_pattern", "rope.freq_base_swa")),
    constants=_CONSTANTS,
    more=_gemma2,
)
GEMMA3 = Architecture(
    family="Gemma3ForCausalLM",
    tensors=plus_one({**OUTSIDE, **SANDWICH_NORMS, **HEAD_NORMS, **PROJECTIONS, **MLP}),
    keys={**_WINDOW, **_CAPS},
    others=frozenset(("attention.sliding_window_pattern", "rope.freq_base_swa")),
    constants=_CONSTANTS,
    more=_gemma3,
)
