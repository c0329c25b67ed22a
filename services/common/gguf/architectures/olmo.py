"""OLMoE, and OLMo 2 and 3, which have their norms after attention and MLP."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import (
    EXPERTS,
    HEAD_NORMS,
    MLP,
    OUTSIDE,
    POST_NORMS,
    PRE_NORMS,
    PROJECTIONS,
)

_DEFAULT_INTERVAL = 4  # every fourth layer of OLMo 3 has no window


def _olmo2(said: Metadata, config: Config) -> Config:
    """Returns the configuration keys for the sliding windows of layers. If there are windows, the
    model is an OLMo 3, and the rotary embedding of the layers with windows is not scaled. Returns
    an empty configuration if there are no windows."""
    window = said.integer("attention.sliding_window")
    if not window:
        return {}
    n_layers = config["num_hidden_layers"]
    has_window = said.per_layer("attention.sliding_window_pattern", n_layers)
    if has_window is None:
        has_window = [(i + 1) % _DEFAULT_INTERVAL != 0 for i in range(n_layers)]
    base = {"rope_theta": config.pop("rope_theta", 500_000.0)}
    local_base = {"rope_theta": said.number("rope.freq_base_swa") or base["rope_theta"]}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in has_window],
        "rope_parameters": {
            "full_attention": {**base, "rope_type": "default", **config.pop("rope_scaling", {})},
            "sliding_attention": {**local_base, "rope_type": "default"},
        },
    }


OLMO2 = Architecture(
    family="Olmo2ForCausalLM",
    tensors={**OUTSIDE, **POST_NORMS, **HEAD_NORMS, **PROJECTIONS, **MLP},
    others=frozenset(
        ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
    ),
    more=_olmo2,
)
OLMOE = Architecture(
    family="OlmoeForCausalLM",
    tensors={**OUTSIDE, **PRE_NORMS, **HEAD_NORMS, **PROJECTIONS, **EXPERTS},
    keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    others=frozenset(("expert_feed_forward_length",)),
    constants={"norm_topk_prob": False},
)
