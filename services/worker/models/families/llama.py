"""Llama and compatible models: a pre-norm decoder with rotary grouped-query attention.

The model is by Touvron et al., 2023. Tensors have the names of Hugging Face's `LlamaForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import AttentionForm
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention, GatedMLP
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Counterpart of Hugging Face's `LlamaConfig`."""

    architecture = "LlamaForCausalLM"
    default_eos_token_ids = (2,)
    # `pretraining_tp` only divides matrices into slices, with an equal result.
    ignored_keys = frozenset(("pretraining_tp", "is_llama_config"))

    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaStage(RotaryStage):
    """One stage of a Llama model."""

    config_type: ClassVar[type[ModelConfig]] = LlamaConfig
    config: LlamaConfig

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        has_bias = self.config.attention_bias
        return Attention.read(
            source,
            prefix,
            self.config,
            form=self.form(index),
            qkv_bias=has_bias,
            output_bias=has_bias,
            rotary=self.rotary(index),
        )

    def form(self, index: int) -> AttentionForm:
        """Returns the window and the scale of the attention of layer `index`."""
        return AttentionForm(window=self.config.layer_windows[index])

    def rotary(self, index: int) -> int | None:
        """Returns the index of the rotary embedding that layer `index` uses, or None if the layer
        uses none. The default is 0, the only rotary embedding."""
        return 0

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        return GatedMLP.read(
            source,
            prefix,
            self.config,
            size=self.config.intermediate_size,
            has_bias=self.config.mlp_bias,
        )
