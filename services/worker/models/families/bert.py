"""BERT: an encoder, whose tokens attend to all tokens of their text (Devlin et al., 2019).

BGE, E5, GTE and MiniLM are BERT models. They make embeddings and scores, and generate no text. A
layer normalises the sums of its residual stream, so there is no norm after the last layer.

A model that scores pairs of texts gets each pair as one prompt. `token_type_stride`, the number of
words in the vocabulary, is added to the ids of the tokens in the second text. So the embedding has
two rows for each word, one for each text: the sum of the word's embedding and of the embedding of
the token type, added in the order of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels import AttentionForm
from kernels.program import Program
from kernels.steps import Buffer
from services.common.pooling import Pooling
from services.worker.models.config import (
    JsonObject,
    ModelConfig,
    NonNegativeFloat,
    PositiveInt,
    UnsupportedModel,
    require,
)
from services.worker.models.decoder import DecoderStage
from services.worker.models.decoder_layers import (
    Activation,
    Attention,
    Embedding,
    Head,
    Layer,
    LayerNorm,
    Norm,
    PlainMLP,
)
from services.worker.models.layer_forms import NormedSumLayer
from services.worker.models.layers import ColumnParallelLinear, RowParallelLinear
from services.worker.models.pooler import Pooler
from services.worker.models.score_heads import Affine, ScoreHead, TanhScores
from services.worker.models.tensor_parallel import HeadShare
from services.worker.models.weights import TensorSource

_CLASSIFIER = "ForSequenceClassification"
_N_PAIR_TYPES = 2  # of the first and the second text of a pair


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """Counterpart of Hugging Face's `BertConfig`."""

    architecture = "BertModel"
    is_causal = False
    read_keys = frozenset((
        "position_embedding_type", "add_cross_attention", "is_causal", "is_decoder",
        "tie_word_embeddings", "vocab_size",
    ))  # fmt: skip
    # Dropout is for training. The keys of poolers are of an older program, and are not read by
    # `transformers`, either. `cross-encoder` models name an activation, which `pooling_files.py`
    # reads.
    ignored_keys = frozenset((
        "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout",
        "gradient_checkpointing", "directionality", "pooler_fc_size",
        "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
        "pooler_type", "output_past", "sbert_ce_default_activation_function",
    ))  # fmt: skip
    distinguishes_texts: ClassVar[bool] = True  # by the types of their tokens

    n_words: PositiveInt  # rows of the stored embedding
    n_positions: PositiveInt  # rows of the table of positions
    n_token_types: PositiveInt = 1  # that prompts use
    intermediate_size: PositiveInt
    type_vocab_size: PositiveInt = _N_PAIR_TYPES
    activation: Activation = field(default="gelu", metadata={"alias": "hidden_act"})
    layer_norm_eps: NonNegativeFloat = 1e-12

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(
            config,
            position_embedding_type=("absolute",),
            add_cross_attention=(False,),
            is_causal=(False,),
            is_decoder=(False,),
        )
        n_words, n_token_types = config.get("vocab_size"), 1
        architecture = str((config.get("architectures") or [""])[0])
        n_types = config.get("type_vocab_size", _N_PAIR_TYPES)
        has_types = isinstance(n_types, int) and n_types >= _N_PAIR_TYPES
        if cls.distinguishes_texts and has_types and architecture.endswith(_CLASSIFIER):
            n_token_types = _N_PAIR_TYPES
        return super().read(config) | {
            "tie_word_embeddings": False,  # of a head that fills in masked tokens
            "n_words": n_words,
            "n_token_types": n_token_types,
            "n_positions": config.get("max_position_embeddings"),
            "vocab_size": n_words * n_token_types if isinstance(n_words, int) else n_words,
        }

    @property
    def token_type_stride(self) -> int:
        return self.n_words if self.n_token_types > 1 else 0


@dataclass(frozen=True, slots=True)
class PositionedTokens:
    """Embeds tokens, adds the embeddings of their positions, and normalises the sums. All ranks
    have the whole tables."""

    tokens: Tensor  # [vocab_size, hidden]
    positions: Tensor  # [n_positions, hidden]
    norm: Norm

    def describe(self, to: Program) -> Buffer:
        return self.norm.describe(to, to.add_positions(self.positions, to.embed(self.tokens)))


class BertStage(DecoderStage):
    """One stage of a BERT model."""

    config_type = BertConfig
    prefix: ClassVar[str] = "bert"
    embedding_name = "bert.embeddings.word_embeddings.weight"
    layers_name = "bert.encoder.layer"
    config: BertConfig

    def read_tokens(self, source: TensorSource) -> Embedding:
        config, name = self.config, f"{self.prefix}.embeddings"
        n_unused, size = config.n_unused_positions, config.hidden_size
        words = source.tensor(self.embedding_name, config.n_words, size)
        types = source.tensor(f"{name}.token_type_embeddings.weight", config.type_vocab_size, size)
        positions = source.tensor(f"{name}.position_embeddings.weight", config.n_positions, size)
        return PositionedTokens(
            torch.cat([words + types[i] for i in range(config.n_token_types)]),
            positions[n_unused:],
            self.read_norm(source, f"{name}.LayerNorm", size),
        )

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        return LayerNorm.read(source, name, size=size, eps=self.config.layer_norm_eps)

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        size = self.config.hidden_size
        return NormedSumLayer(
            self._read_attention(source, f"{prefix}.attention"),
            self.read_norm(source, f"{prefix}.attention.output.LayerNorm", size),
            self._read_mlp(source, prefix),
            self.read_norm(source, f"{prefix}.output.LayerNorm", size),
        )

    def read_head(self, source: TensorSource) -> Head:
        """Raises UnsupportedModel, because no family of encoders generates tokens."""
        raise UnsupportedModel(
            f"{self.config.architecture} generates no tokens, and nothing says how it makes vectors"
        )

    def read_pooler(self, source: TensorSource, pooling: Pooling) -> Pooler:
        head = self.read_score_head(source, pooling.n_values) if pooling.makes_scores else None
        return Pooler(pooling, None, head)

    def read_score_head(self, source: TensorSource, n_values: int) -> ScoreHead:
        """Reads the classification head."""
        size = self.config.hidden_size
        return TanhScores(
            Affine.read(source, f"{self.prefix}.pooler.dense", n_in=size, n_out=size),
            Affine.read(source, "classifier", n_in=size, n_out=n_values),
        )

    def _read_attention(self, source: TensorSource, prefix: str) -> Attention:
        config, size = self.config, self.config.hidden_size
        heads = HeadShare.of(config, source.tp_rank, source.tp_size)
        share = heads.q_elements(config)
        return Attention(
            qkv=ColumnParallelLinear.read(
                source,
                [f"{prefix}.self.{name}" for name in ("query", "key", "value")],
                n_in=size,
                n_out=(size,) * 3,
                shares=(share,) * 3,
                has_bias=True,
            ),
            output=RowParallelLinear.read(
                source,
                f"{prefix}.output.dense",
                n_in=size,
                n_out=size,
                share=share,
                has_bias=True,
            ),
            n_heads=len(heads.q),
            n_kv_heads=len(heads.kv),
            head_dim=config.head_dim,
            form=AttentionForm(is_causal=False),
            rotary=None,
        )

    def _read_mlp(self, source: TensorSource, prefix: str) -> PlainMLP:
        inner, size = self.config.intermediate_size, self.config.hidden_size
        up = ColumnParallelLinear.read(
            source, [f"{prefix}.intermediate.dense"], n_in=size, n_out=(inner,), has_bias=True
        )
        down = RowParallelLinear.read(
            source, f"{prefix}.output.dense", n_in=inner, n_out=size, has_bias=True
        )
        return PlainMLP(up, down, self.config.activation)
