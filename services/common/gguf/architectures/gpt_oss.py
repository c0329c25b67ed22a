"""gpt-oss. Its experts have biases. In the tensors of the model family, rows of the gate matrix and
of the up matrix of an expert alternate."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.gemma import refuse_other_base, window_layers
from services.common.gguf.architectures.names import LATE_NORMS, OUTSIDE, PROJECTIONS
from services.common.gguf.tensor_rules import Both


def _gpt_oss(said: Metadata, config: Config) -> Config:
    refuse_other_base(said)
    rope = {"rope_theta": config.pop("rope_theta", None), **config.pop("rope_scaling", {})}
    if rope.get("rope_type") == "yarn":
        rope["truncate"] = False
    rope.setdefault("rope_type", "default")
    return {
        **window_layers(said, config),
        "intermediate_size": said.needed("expert_feed_forward_length"),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "rope_parameters": {key: value for key, value in rope.items() if value is not None},
        # The matrices of experts have their outputs first, as in files of this format.
        "quantization_config": {"quant_method": "mxfp4"},
    }


_OTHERS = frozenset((
    "attention.sliding_window_pattern", "expert_feed_forward_length", "rope.freq_base_swa",
))  # fmt: skip
GPT_OSS = Architecture(
    family="GptOssForCausalLM",
    tensors={
        **OUTSIDE,
        **LATE_NORMS,
        **PROJECTIONS,
        "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_up_proj": Both("ffn_gate_exps", "ffn_up_exps", alternates=True),
        "mlp.experts.gate_up_proj_bias": Both(
            "ffn_gate_exps.bias", "ffn_up_exps.bias", alternates=True
        ),
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    },
    keys={
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    others=_OTHERS,
    more=_gpt_oss,
)
