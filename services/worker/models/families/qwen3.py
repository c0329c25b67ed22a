"""Qwen3: no biases, and a norm over each head of queries and keys (Yang et al., 2025)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Attention
from services.worker.models.families.qwen2 import QwenConfig
from services.worker.models.weights import TensorSource

# Defaults of `Qwen3Config` for missing keys.
_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(QwenConfig):
    """Counterpart of Hugging Face's `Qwen3Config`."""

    architecture = "Qwen3ForCausalLM"

    attention_bias: bool = False

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        return super().read({"head_dim": _DEFAULT_HEAD_DIM, **config})


class QwenHeadNormStage(RotaryStage):
    """One stage of a model with Qwen3's attention, which normalises each head."""

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=self.config.layer_windows[index]),
            qkv_bias=self.has_attention_bias,
            output_bias=self.has_attention_bias,
            head_norms=self.read_head_norms(source, prefix),
        )

    @property
    @abstractmethod
    def has_attention_bias(self) -> bool:
        """Whether all four projections of attention have biases."""


class Qwen3Stage(QwenHeadNormStage):
    """One stage of a Qwen3 model."""

    config_type = Qwen3Config
    config: Qwen3Config

    @property
    def has_attention_bias(self) -> bool:
        return self.config.attention_bias
