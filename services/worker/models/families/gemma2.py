"""Gemma 2: norms before and after each part of a layer, and capped scores (Gemma Team, 2024).

Every second layer has a window. Norms scale by one plus the stored weight. Embeddings are scaled by
the square root of the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels import AttentionForm
from services.worker.models.config import (
    JsonObject,
    PositiveFloat,
    read_windows,
    require,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import (
    MLP,
    Attention,
    Embedding,
    GatedMLP,
    Head,
    Layer,
    Norm,
)
from services.worker.models.layer_forms import CappedHead, SandwichLayer, ScaledEmbedding
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import LayerWindows

_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(LayerWindows, RotaryConfig):
    """The fields that configurations of Gemma 1, 2 and 3 share."""

    read_keys = RotaryConfig.read_keys | {"hidden_activation", "sliding_window", "layer_types"}
    # `sliding_window_size` repeats `sliding_window`.
    ignored_keys = frozenset(("cache_implementation", "sliding_window_size"))
    hidden_acts: ClassVar[tuple[str, ...]] = (_ACTIVATION,)

    attention_bias: bool = False
    query_pre_attn_scalar: PositiveFloat = 256.0  # scores are divided by the square root
    attn_logit_softcapping: PositiveFloat | None
    final_logit_softcapping: PositiveFloat | None
    tie_word_embeddings: bool = True

    @classmethod
    def read_gemma(cls, config: JsonObject, *, sliding: Sequence[bool]) -> dict[str, Any]:
        """Returns the fields that are read from several keys. `sliding` says, for each layer,
        whether the layer has a window by default."""
        require(config, hidden_activation=(_ACTIVATION, None))
        window = config.get("sliding_window", 4096)
        return super().read({"head_dim": 256, **config}) | {
            "windows": read_windows(config, window=window, default=sliding)
        }


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Counterpart of Hugging Face's `Gemma2Config`."""

    architecture = "Gemma2ForCausalLM"
    default_eos_token_ids = (1,)
    default_n_kv_heads = 4

    attn_logit_softcapping: PositiveFloat | None = 50.0
    final_logit_softcapping: PositiveFloat | None = 30.0

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        sliding = [i % 2 == 0 for i in range(config.get("num_hidden_layers") or 0)]
        return cls.read_gemma(config, sliding=sliding) | {
            # null switches a cap off; a missing key means the default.
            key: None
            for key in ("attn_logit_softcapping", "final_logit_softcapping")
            if key in config and config[key] is None
        }


class GemmaStage(RotaryStage):
    """One stage of a Gemma 1, 2 or 3 model: the parts that these models share."""

    config: GemmaConfig

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        # The factor is rounded to the element type, as in training.
        factor = torch.tensor(self.hidden_size**0.5, dtype=self.dtype).item()
        return ScaledEmbedding(tokens, factor)

    def read_scale(self, source: TensorSource, name: str, size: int) -> Tensor:
        return 1 + super().read_scale(source, name, size).float()  # kept in float32

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}_layernorm", self.config.hidden_size)

        return SandwichLayer(
            norm("input"),
            self.read_attention(source, f"{prefix}.self_attn", index),
            norm("post_attention"),
            norm("pre_feedforward"),
            self.read_mlp(source, f"{prefix}.mlp", index),
            norm("post_feedforward"),
        )

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        has_bias = self.config.attention_bias
        return Attention.read(
            source,
            prefix,
            self.config,
            form=self.form(index),
            qkv_bias=has_bias,
            output_bias=has_bias,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size = self.config.intermediate_size
        return GatedMLP.read(source, prefix, self.config, size=size, gate="gelu_tanh")

    def form(self, index: int) -> AttentionForm:
        """Returns the window, scale and cap of the attention of layer `index`."""
        return AttentionForm(
            window=self.config.layer_windows[index],
            scale=self.config.query_pre_attn_scalar**-0.5,
            soft_cap=self.config.attn_logit_softcapping,
        )

    def read_head(self, source: TensorSource) -> Head:
        head, cap = super().read_head(source), self.config.final_logit_softcapping
        return head if cap is None else CappedHead(head, cap)


class Gemma2Stage(GemmaStage):
    """One stage of a Gemma 2 model."""

    config_type = Gemma2Config
