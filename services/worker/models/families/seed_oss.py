"""Seed-OSS: Llama with separate settings for the bias of the output projection (ByteDance Seed,
2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject
from services.worker.models.decoder_layers import Attention
from services.worker.models.families.llama import LlamaConfig, LlamaStage
from services.worker.models.weights import TensorSource

# Defaults of `SeedOssConfig` for missing keys.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8}


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    """Counterpart of Hugging Face's `SeedOssConfig`."""

    architecture = "SeedOssForCausalLM"
    default_eos_token_ids = (2,)
    ignored_keys = LlamaConfig.ignored_keys | {"residual_dropout"}  # for training only

    attention_bias: bool = True  # of queries, keys and values
    attention_out_bias: bool = False

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        return super().read({**_DEFAULTS, **config})


class SeedOssStage(LlamaStage):
    """One stage of a Seed-OSS model."""

    config_type = SeedOssConfig
    config: SeedOssConfig

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(),
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_out_bias,
        )
