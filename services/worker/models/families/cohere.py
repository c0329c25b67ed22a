"""Command R: attention and MLP are computed in parallel from one layer norm (Cohere, 2024).

Rotary embedding rotates pairs of neighbouring elements, norms have no biases, and logits are
scaled. Later models of this kind are in `cohere2.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kernels import AttentionForm
from services.worker.models.config import (
    JsonObject,
    ModelConfig,
    PositiveFloat,
    default_head_dim,
    require,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Attention, Head, Layer, LayerNorm, Norm
from services.worker.models.layer_forms import ParallelLayer, ScaledHead
from services.worker.models.rope import head_order
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource

# Keys of older files, which must have these values.
_ALWAYS: Mapping[str, Sequence[Any]] = {
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
}


@dataclass(frozen=True, kw_only=True)
class CohereConfig(RotaryConfig):
    """Counterpart of Hugging Face's `CohereConfig`."""

    architecture = "CohereForCausalLM"
    default_eos_token_ids = (255001,)
    default_rope_theta = 500_000.0
    read_keys = RotaryConfig.read_keys | {*_ALWAYS, "model_max_length"}
    # For training, and for another program.
    ignored_keys = frozenset(("pretraining_tp", "use_parallel_embedding"))
    turns_neighbours = True

    # The eps of layer norms, in spite of the field's name.
    rms_norm_eps: PositiveFloat = field(default=1e-5, metadata={"alias": "layer_norm_eps"})
    logit_scale: PositiveFloat = 0.0625
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, **_ALWAYS)
        # Heads divide the hidden size; another head_dim is refused.
        head_dim = default_head_dim(config.get("hidden_size"), config.get("num_attention_heads"))
        require(config, head_dim=(head_dim, None))
        return super().read(config)


class CohereStage(RotaryStage):
    """One stage of a Command R model."""

    config_type: ClassVar[type[ModelConfig]] = CohereConfig
    config: CohereConfig

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        weight = source.tensor(f"{name}.weight", size)
        return LayerNorm(weight, torch.zeros_like(weight), self.config.rms_norm_eps)

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        return ParallelLayer(
            self.read_norm(source, f"{prefix}.input_layernorm", self.config.hidden_size),
            self.read_attention(source, f"{prefix}.self_attn", index),
            self.read_mlp(source, f"{prefix}.mlp", index),
        )

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        has_bias = self.config.attention_bias
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=self.config.layer_windows[index]),
            qkv_bias=has_bias,
            output_bias=has_bias,
            order=head_order(self.config),
            rotary=self.rotary(index),
        )

    def rotary(self, index: int) -> int | None:
        """Returns the index of the rotary embedding that layer `index` uses, or None for no rotary
        embedding. The default is 0, the only rotary embedding."""
        return 0

    def read_head(self, source: TensorSource) -> Head:
        return ScaledHead(super().read_head(source), self.config.logit_scale)
