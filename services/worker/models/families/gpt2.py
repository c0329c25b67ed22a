"""GPT-2: learned positions, layer norms with biases, an MLP without gates (Radford et al., 2019).

The matrices of linear layers are stored transposed, [n_in, n_out]. Query, key and value are one
matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject, ModelConfig, PositiveFloat, PositiveInt
from services.worker.models.decoder import DecoderStage
from services.worker.models.decoder_layers import (
    Activation,
    Attention,
    Embedding,
    Layer,
    LayerNorm,
    Norm,
    PlainMLP,
    PositionedEmbedding,
    PreNormLayer,
)
from services.worker.models.layers import ColumnParallelLinear, RowParallelLinear
from services.worker.models.tensor_parallel import HeadShare
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """Counterpart of Hugging Face's `GPT2Config`, whose keys differ from the keys of other
    families."""

    architecture = "GPT2LMHeadModel"
    default_eos_token_ids = (50256,)
    read_keys = frozenset(("n_inner",))
    # `reorder_and_upcast_attn` changes the order of roundings only; `n_ctx` repeats
    # `n_positions`; the keys of summaries are for other tasks.
    ignored_keys = frozenset((
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "reorder_and_upcast_attn",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj",
    ))  # fmt: skip

    hidden_size: PositiveInt = field(metadata={"alias": "n_embd"})
    n_layers: PositiveInt = field(metadata={"alias": "n_layer"})
    n_heads: PositiveInt = field(metadata={"alias": "n_head"})
    max_position_embeddings: PositiveInt = field(metadata={"alias": "n_positions"})
    intermediate_size: PositiveInt
    activation: Activation = field(default="gelu_new", metadata={"alias": "activation_function"})
    layer_norm_epsilon: PositiveFloat = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        size = config.get("n_inner")
        if size is None:
            size = 4 * (config.get("n_embd") or 0)
        return super().read(config) | {"intermediate_size": size}


class GPT2Stage(DecoderStage):
    """One stage of a GPT-2 model."""

    config_type = GPT2Config
    embedding_name = "transformer.wte.weight"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"
    config: GPT2Config

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        shape = (self.config.max_position_embeddings, self.config.hidden_size)
        return PositionedEmbedding(tokens, source.tensor("transformer.wpe.weight", *shape))

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        eps = self.config.layer_norm_epsilon
        return LayerNorm.read(source, name, size=size, eps=eps)

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        return PreNormLayer(
            self.read_norm(source, f"{prefix}.ln_1", hidden_size),
            self._read_attention(source, f"{prefix}.attn", index),
            self.read_norm(source, f"{prefix}.ln_2", hidden_size),
            self._read_mlp(source, f"{prefix}.mlp"),
        )

    def _read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        size = self.config.hidden_size
        scale = self.config.head_dim**-0.5 if self.config.scale_attn_weights else 1.0
        if self.config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        heads = HeadShare.of(self.config, source.tp_rank, source.tp_size)
        q = heads.q_elements(self.config)  # k and v follow in this matrix
        return Attention(
            qkv=ColumnParallelLinear.read(
                source,
                [f"{prefix}.c_attn"] * 3,
                n_in=size,
                n_out=(3 * size,) * 3,
                shares=[range(i * size + q.start, i * size + q.stop) for i in range(3)],
                has_bias=True,
                is_transposed=True,
            ),
            output=RowParallelLinear.read(
                source,
                f"{prefix}.c_proj",
                n_in=size,
                n_out=size,
                share=q,
                has_bias=True,
                is_transposed=True,
            ),
            n_heads=len(heads.q),
            n_kv_heads=len(heads.kv),
            head_dim=self.config.head_dim,
            form=AttentionForm(scale=scale),
            rotary=None,
        )

    def _read_mlp(self, source: TensorSource, prefix: str) -> PlainMLP:
        size, inner = self.config.hidden_size, self.config.intermediate_size
        up = ColumnParallelLinear.read(
            source,
            [f"{prefix}.c_fc"],
            n_in=size,
            n_out=(inner,),
            has_bias=True,
            is_transposed=True,
        )
        down = RowParallelLinear.read(
            source,
            f"{prefix}.c_proj",
            n_in=inner,
            n_out=size,
            has_bias=True,
            is_transposed=True,
        )
        return PlainMLP(up, down, self.config.activation)
