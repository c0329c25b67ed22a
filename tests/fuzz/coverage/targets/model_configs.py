"""`config.json` and `generation_config.json` of every family."""

import json
import tempfile
from pathlib import Path

from services.worker.models import UnsupportedModel
from services.worker.models.config_file import read_config
from services.worker.models.registry import FAMILIES
from tests.fuzz.coverage.target import Choices, Target, any_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 199, "hidden_size": 48,
    "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "hidden_act": "silu", "head_dim": 8, "rope_theta": 1e4,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 199, "n_embd": 48, "n_layer": 3,
    "n_head": 6, "n_positions": 256, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
FURTHER = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256.0, "sliding_window": 8,
    "layer_types": ["full_attention"] * 3, "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_experts": 4, "moe_intermediate_size": 72, "norm_topk_prob": True, "mlp_only_layers": [0],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window_pattern": 2,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "decoder_sparse_step": 1,
    "use_sliding_window": True, "attention_bias": True, "torch_dtype": "bfloat16",
    "word_embed_proj_dim": 48, "ffn_dim": 72, "do_layer_norm_before": True,
    "activation_function": "relu", "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
}  # fmt: skip
_DIRECTORY = tempfile.TemporaryDirectory()


def run(data: bytes) -> None:
    """Takes bytes as a file, or changes a configuration by them."""
    choices = Choices(data)
    directory = Path(_DIRECTORY.name)
    content, generation = data[1:], "{}"
    if choices.number(4):
        family = choices.one_of(sorted(FAMILIES))
        config = dict(GPT2) if family.startswith("GPT2") else {**CONFIG, "architectures": [family]}
        if family.startswith("Gemma"):
            config["hidden_act"] = "gelu_pytorch_tanh"
        for name in FURTHER:
            if not choices.number(4):
                config[name] = FURTHER[name]
        content = json.dumps(choices.changed(config, (*CONFIG, *FURTHER))).encode()
        generation = json.dumps(choices.changed({"eos_token_id": [2]}))
    (directory / "config.json").write_bytes(content)
    (directory / "generation_config.json").write_text(generation)
    try:
        read = read_config(directory)
    except UnsupportedModel as error:
        assert len(str(error)) < 1 << 14, len(str(error))
        return
    assert len(read.layer_windows) == read.n_layers
    read.fingerprint()


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\1"),
        *(b"\0" + json.dumps(file).encode() for file in (CONFIG, GPT2)),
        *(bytes([1, family]) + b"\1" * len(FURTHER) + bytes([0, field, 5, 4])
          for family in range(len(FAMILIES)) for field in (0, 4, 9)),
    ],
    words=[*(f'"{name}":' for name in (*CONFIG, *FURTHER)), *FAMILIES, "1e999", "-1", "[[[["],
)  # fmt: skip
