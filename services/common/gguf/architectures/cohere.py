"""Command R, R7B and A. Their rotary embedding rotates pairs of adjacent elements, as llama.cpp
does."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.gemma import refuse_other_base, window_layers
from services.common.gguf.architectures.names import MLP, OUTSIDE, PROJECTIONS
from services.common.gguf.tensor_rules import Rules

_TENSORS: Rules = {**OUTSIDE, **PROJECTIONS, **MLP, "input_layernorm": "attn_norm"}
_KEYS = {"logit_scale": "logit_scale"}
_RENAMED = {"attention.layer_norm_rms_epsilon": ""}
_EPSILON = {"attention.layer_norm_epsilon": "layer_norm_eps"}


def _biases(said: Metadata, config: Config) -> Config:
    config.pop("head_dim", None)  # the family derives this number
    return {"attention_bias": said.has("blk.0.attn_q.bias")}


def _cohere2(said: Metadata, config: Config) -> Config:
    refuse_other_base(said)
    return {**_biases(said, config), **window_layers(said, config)}


COMMAND_R = Architecture(
    family="CohereForCausalLM",
    tensors=_TENSORS,
    keys={**_KEYS, **_EPSILON},
    renamed=_RENAMED,
    more=_biases,
)
COHERE2 = Architecture(
    family="Cohere2ForCausalLM",
    tensors=_TENSORS,
    keys={**_KEYS, **_EPSILON, "attention.sliding_window": "sliding_window"},
    renamed=_RENAMED,
    others=frozenset(("attention.sliding_window_pattern", "rope.freq_base_swa")),
    more=_cohere2,
)
