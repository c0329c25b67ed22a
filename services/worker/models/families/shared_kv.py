"""Parts that Gemma 3n and Gemma 4 share: layers of two kinds, keys and values that later layers
share, and additional inputs for each layer (see `per_layer_inputs.py`).

Layers with a window and layers without one have different rotary settings. The last layers attend
to keys and values of earlier layers. The additional inputs of all layers are computed on the first
stage. In a row of hidden states, they follow the residual streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kernels import AttentionForm
from services.worker.models.config import (
    JsonObject,
    KVSizes,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    require,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention, Embedding, GatedMLP, Head
from services.worker.models.families.gemma3 import split_rope
from services.worker.models.layer_forms import CappedHead, ScaledEmbedding
from services.worker.models.layers import RMSNorm, VocabParallelEmbedding
from services.worker.models.normed_attention import (
    KVNorms,
    NormedAttention,
    Projected,
    sources_of,
)
from services.worker.models.per_layer_inputs import PerLayerGate, PerLayerTable, whole_weight
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RopeConfig, RotaryConfig, read_rope
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import LayerWindows

_ACTIVATION = "gelu_pytorch_tanh"
_FULL, _SLIDING = 0, 1  # indices of the rotary embeddings in `make_rotaries`


@dataclass(frozen=True, kw_only=True)
class SharedKVConfig(LayerWindows, RotaryConfig):
    """The fields that the configurations of Gemma 3n and Gemma 4 have in common."""

    read_keys = RotaryConfig.read_keys | {"hidden_activation", "sliding_window", "layer_types"}
    hidden_acts = (_ACTIVATION,)
    default_rope_theta = 1_000_000.0

    attention_bias: bool = False
    final_logit_softcapping: PositiveFloat | None = None
    sliding_rope: RopeConfig  # for layers with a window; `rope` is for all others
    n_shared_layers: NonNegativeInt = field(default=0, metadata={"alias": "num_kv_shared_layers"})
    per_layer_size: NonNegativeInt = field(
        default=256, metadata={"alias": "hidden_size_per_layer_input"}
    )
    per_layer_vocab_size: PositiveInt = field(
        default=262_144, metadata={"alias": "vocab_size_per_layer_input"}
    )
    tie_word_embeddings: bool = True

    @property
    def full(self) -> Self:
        """This configuration, with the attention settings of layers without a window."""
        return self

    @property
    def sliding(self) -> Self:
        """This configuration, with the attention settings of layers with a window."""
        return replace(self, rope=self.sliding_rope)

    @property
    def kv_sources(self) -> Sequence[int]:
        return sources_of(self.windows, self.n_shared_layers)

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        full, sliding = (
            KVSizes(each.n_kv_heads, each.head_dim, each.head_dim)
            for each in (self.full, self.sliding)
        )
        return tuple(
            KVSizes(0, 0, 0) if source != i else full if self.windows[i] is None else sliding
            for i, source in enumerate(self.kv_sources)
        )

    def check(self) -> None:
        for kind in (self.full, self.sliding):
            RotaryConfig.check(kind)
        sources_of(self.windows, self.n_shared_layers)

    @classmethod
    def read_shared(cls, config: JsonObject, rope: JsonObject | None) -> dict[str, Any]:
        """Returns the fields that are read from several keys, except the windows.

        `rope` has the rotary settings of both kinds of layers. If it is None, the keys of older
        files are read instead.
        """
        require(config, hidden_activation=(_ACTIVATION, None))
        full, sliding = split_rope({**config, "rope_parameters": rope})
        fields = super().read({"head_dim": 256, **config, **full}) | {
            "sliding_rope": read_rope(sliding, default_theta=10_000.0)
        }
        cap = "final_logit_softcapping"
        if (
            cap in config and config[cap] is None
        ):  # null switches the cap off; a missing key does not
            fields[cap] = None
        return fields


class SharedKVStage(RotaryStage):
    """One stage of a Gemma 3n or Gemma 4 model: the parts that these models have in common."""

    config: SharedKVConfig

    @property
    def stream_size(self) -> int:
        """Number of elements that the residual streams take at the beginning of a row of hidden
        states. The per-layer inputs fill the rest of the row."""
        return self.config.hidden_size

    @property
    def hidden_size(self) -> int:
        return self.stream_size + self.config.n_layers * self.config.per_layer_size

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        return [  # _FULL, _SLIDING
            RotaryEmbedding(kind, dtype=self.dtype, device=self.device)
            for kind in (self.config.full, self.config.sliding)
        ]

    def read_scale(self, source: TensorSource, name: str, size: int) -> Tensor:
        return (
            super().read_scale(source, name, size).float()
        )  # kept in float32: the scaled result is rounded

    def plain_norm(self, size: int) -> RMSNorm:
        """Returns a norm without a learned scale."""
        return RMSNorm(torch.ones(size, device=self.device), self.config.rms_norm_eps)

    def scaled(self, tokens: Embedding) -> Embedding:
        """Returns the embedding of tokens, scaled by the square root of the hidden size."""
        return ScaledEmbedding(tokens, self._rounded(self.config.hidden_size**0.5))

    def read_per_layer_table(self, source: TensorSource) -> PerLayerTable:
        """Reads the table and the projection that compute the per-layer inputs of all layers."""
        config, name = self.config, "model.per_layer_model_projection"
        size = config.per_layer_size
        width = config.n_layers * size
        return PerLayerTable(
            VocabParallelEmbedding.read(
                source,
                "model.embed_tokens_per_layer.weight",
                vocab_size=config.per_layer_vocab_size,
                hidden_size=width,
            ),
            self._rounded(size**0.5),
            whole_weight(source, name, width, config.hidden_size),
            config.hidden_size**-0.5,
            self.read_rms_norm(source, "model.per_layer_projection_norm", size),
            size,
        )

    def read_per_layer_gate(self, source: TensorSource, prefix: str, index: int) -> PerLayerGate:
        """Reads the gate of the per-layer inputs of layer `index`."""
        hidden_size, size = self.config.hidden_size, self.config.per_layer_size
        return PerLayerGate.read(
            source,
            prefix,
            hidden_size=hidden_size,
            size=size,
            begin=self.stream_size + index * size,
            norm=self.read_norm(source, f"{prefix}.post_per_layer_input_norm", hidden_size),
        )

    def projected(self, index: int) -> Projected:
        """Returns which projections the attention of layer `index` computes.

        By default the result is "q" for a layer that attends to the keys and values of an earlier
        layer, and "qkv" for other layers.
        """
        return "qkv" if self.config.kv_sources[index] == index else "q"

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        window, projected = self.config.layer_windows[index], self.projected(index)
        config = self.config.full if window is None else self.config.sliding
        size, kv_norms = config.head_dim, None
        if projected != "q":
            kv_norms = KVNorms(
                self.read_rms_norm(source, f"{prefix}.k_norm", size), self.plain_norm(size)
            )
        return NormedAttention.read_normed(
            source,
            prefix,
            config,
            projected=projected,
            form=AttentionForm(window=window, scale=1.0),
            rotary=_FULL if window is None else _SLIDING,
            has_bias=config.attention_bias,
            q_norm=self.read_rms_norm(source, f"{prefix}.q_norm", size),
            kv_norms=kv_norms,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size = self.mlp_size(index)
        return GatedMLP.read(source, prefix, self.config, size=size, gate="gelu_tanh")

    def mlp_size(self, index: int) -> int:
        """Returns the inner size of the MLP of layer `index`."""
        return self.config.intermediate_size

    def read_head(self, source: TensorSource) -> Head:
        head, cap = super().read_head(source), self.config.final_logit_softcapping
        return head if cap is None else CappedHead(head, cap)

    def _rounded(self, factor: float) -> float:
        """Returns `factor` rounded to the model's element type, as in training."""
        return torch.tensor(factor, dtype=self.dtype).item()
