"""OPT: learned positions, layer norms with biases, an MLP without gates (Zhang et al., 2022).

The Orca paper's GPT-3 models are served as OPT models with the same shapes (`models/configs`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import (
    JsonObject,
    ModelConfig,
    PositiveInt,
    UnsupportedModel,
    require,
)
from services.worker.models.decoder import DecoderStage
from services.worker.models.decoder_layers import (
    Activation,
    Attention,
    Embedding,
    Layer,
    LayerNorm,
    NoNorm,
    Norm,
    PlainMLP,
    PositionedEmbedding,
    PreNormLayer,
)
from services.worker.models.layer_forms import NormedSumLayer
from services.worker.models.layers import ColumnParallelLinear, RowParallelLinear
from services.worker.models.weights import TensorSource

_LAYER_NORM_EPS = 1e-5
_POSITION_OFFSET = 2  # the first rows of the table are unused (padding)


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """Counterpart of Hugging Face's `OPTConfig`."""

    architecture = "OPTForCausalLM"
    default_eos_token_ids = (2,)
    read_keys = frozenset((
        "word_embed_proj_dim", "enable_bias", "layer_norm_elementwise_affine",
    ))  # fmt: skip
    ignored_keys = frozenset(("dropout", "activation_dropout", "layerdrop", "init_std"))

    intermediate_size: PositiveInt = field(metadata={"alias": "ffn_dim"})
    activation: Activation = field(default="relu", metadata={"alias": "activation_function"})
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = field(
        default=False, metadata={"alias": "_remove_final_layer_norm"}
    )
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, enable_bias=(True,), layer_norm_elementwise_affine=(True,))
        size, hidden_size = config.get("word_embed_proj_dim"), config.get("hidden_size")
        if size is not None and size != hidden_size:
            raise UnsupportedModel(
                f"config.json: word_embed_proj_dim ({size}) is not hidden_size ({hidden_size})"
            )
        return super().read(config)


class OPTStage(DecoderStage):
    """One stage of an OPT model."""

    config_type = OPTConfig
    embedding_name = "model.decoder.embed_tokens.weight"
    layers_name = "model.decoder.layers"
    norm_name = "model.decoder.final_layer_norm"
    config: OPTConfig

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        n_positions = self.config.max_position_embeddings + _POSITION_OFFSET
        name = "model.decoder.embed_positions.weight"
        table = source.tensor(name, n_positions, self.config.hidden_size)
        return PositionedEmbedding(tokens, table[_POSITION_OFFSET:])

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        return LayerNorm.read(source, name, size=size, eps=_LAYER_NORM_EPS)

    def read_final_norm(self, source: TensorSource) -> Norm:
        if self.config.do_layer_norm_before and not self.config.remove_final_layer_norm:
            return super().read_final_norm(source)
        return NoNorm()

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        attention_norm = self.read_norm(source, f"{prefix}.self_attn_layer_norm", hidden_size)
        attention = Attention.read(
            source,
            f"{prefix}.self_attn",
            self.config,
            form=AttentionForm(),
            qkv_bias=True,
            output_bias=True,
            output_name="out_proj",
            rotary=None,
        )
        mlp_norm = self.read_norm(source, f"{prefix}.final_layer_norm", hidden_size)
        mlp = self._read_mlp(source, prefix)
        if self.config.do_layer_norm_before:
            return PreNormLayer(attention_norm, attention, mlp_norm, mlp)
        return NormedSumLayer(attention, attention_norm, mlp, mlp_norm)

    def _read_mlp(self, source: TensorSource, prefix: str) -> PlainMLP:
        size, hidden_size = self.config.intermediate_size, self.config.hidden_size
        up = ColumnParallelLinear.read(
            source, [f"{prefix}.fc1"], n_in=hidden_size, n_out=(size,), has_bias=True
        )
        down = RowParallelLinear.read(
            source, f"{prefix}.fc2", n_in=size, n_out=hidden_size, has_bias=True
        )
        return PlainMLP(up, down, self.config.activation)
