"""The decoder of all families, which computes logits from tokens, layer by layer.

`DecoderStage` implements everything that is equal in all families. A family implements
`read_layer`, mostly with the layers of `decoder_layers.py`, and overrides other methods only where
the family differs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kernels import AttentionForm, HeadNorms
from services.common.pooling import Pooling
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.decoder_layers import (
    MLP,
    Attention,
    Embedding,
    GatedMLP,
    Head,
    Layer,
    Norm,
    NormedHead,
    PreNormLayer,
    TokenEmbedding,
)
from services.worker.models.layers import RMSNorm, VocabParallelEmbedding, VocabParallelHead
from services.worker.models.pooler import Pooler, norm_program
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.score_heads import LinearScores, ScoreHead
from services.worker.models.stage import StageModel
from services.worker.models.stage_place import StagePlace
from services.worker.models.stage_program import StagePieces
from services.worker.models.weights import Shard, TensorSource


class DecoderStage(StageModel):
    """One stage of a decoder model. Families override the methods that differ from this default."""

    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    layers_name: ClassVar[str] = "model.layers"
    norm_name: ClassVar[str] = "model.norm"
    head_name: ClassVar[str] = "lm_head.weight"

    def __init__(
        self,
        config: ModelConfig,
        place: StagePlace,
        *,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, place, dtype=dtype, device=device)
        self._table: VocabParallelEmbedding | None = None
        pieces = StagePieces(
            self.read_tokens(source) if place.is_first else None,
            self.make_rotaries(),
            [self.read_layer(source, f"{self.layers_name}.{i}", i) for i in place.layers],
            self.read_head(source) if self.has_head else None,
            self.hidden_size,
            [self.kv_groups.of_layers[i] for i in place.layers],
        )
        program = source.adapted(pieces.program(dtype, place.tp_size))
        self.runner = place.ops.runner(program)

    def read_tokens(self, source: TensorSource) -> Embedding:
        """Reads the embedding, which turns tokens into the hidden states that enter the first
        layer."""
        self._table = self._read_table(source)
        return self.read_embedding(source, TokenEmbedding(self._table))

    def _read_table(self, source: TensorSource) -> VocabParallelEmbedding:
        size, hidden_size = self.config.vocab_size, self.config.hidden_size
        return VocabParallelEmbedding.read(
            source,
            self.embedding_name,
            vocab_size=size,
            hidden_size=hidden_size,
            is_tied=self.has_head and self.config.tie_word_embeddings,
        )

    def read_head(self, source: TensorSource) -> Head:
        """Reads the head, which turns the hidden states after the last layer into logits."""
        return NormedHead(self.read_final_norm(source), self._read_projection(source))

    def read_pooler(self, source: TensorSource, pooling: Pooling) -> Pooler:
        """Reads the pooler, which makes vectors (embeddings or scores) from the hidden states after
        the last layer. Raises UnsupportedModel if the family does not support `pooling`."""
        hidden_size, is_plain = self.config.hidden_size, self._has_plain_head
        if self.hidden_size != hidden_size or (pooling.head == "yes-no" and not is_plain):
            raise UnsupportedModel(f"pooling of {self.config.architecture} is not served")
        return Pooler(
            pooling,
            self.ops.runner(norm_program(self.read_final_norm(source), hidden_size, self.dtype)),
            self._read_score_head(source, pooling),
        )

    def _read_score_head(self, source: TensorSource, pooling: Pooling) -> ScoreHead | None:
        """Reads the score head, which turns a hidden state into scores, in float32. Returns None if
        the vectors are embeddings."""
        hidden_size = self.config.hidden_size
        if pooling.head == "none":
            return None
        if pooling.head == "classification":
            shape = (pooling.n_values, hidden_size)
            return LinearScores(source.tensor("score.weight", *shape, dtype=torch.float32))
        name = self.embedding_name if self.config.tie_word_embeddings else self.head_name
        yes, no = (
            source.tensor(
                name,
                self.config.vocab_size,
                hidden_size,
                shard=Shard(0, range(token_id, token_id + 1)),
                dtype=torch.float32,
            )
            for token_id in pooling.answer_token_ids
        )
        return LinearScores(yes - no)

    @property
    def _has_plain_head(self) -> bool:
        """Whether logits are products of normalised hidden states with the head's matrix."""
        return type(self).read_head is DecoderStage.read_head

    def _read_projection(self, source: TensorSource) -> VocabParallelHead:
        is_tied = self.config.tie_word_embeddings
        if is_tied and self._table is not None:
            return VocabParallelHead.tied(self._table)
        name = self.embedding_name if is_tied else self.head_name
        size, hidden_size = self.config.vocab_size, self.config.hidden_size
        return VocabParallelHead.read(source, name, vocab_size=size, hidden_size=hidden_size)

    @abstractmethod
    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        """Reads the layer with number `index` in the whole model. `prefix` begins the names of its
        tensors."""

    @abstractmethod
    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        """Reads a norm of the kind that the family uses."""

    def read_final_norm(self, source: TensorSource) -> Norm:
        """Reads the norm between the last layer and the head."""
        return self.read_norm(source, self.norm_name, self.config.hidden_size)

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        """Returns the embedding that the first stage applies to tokens. The default is `tokens`,
        which looks up the row of each token in the embedding table."""
        return tokens

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        """Returns the rotary embeddings of queries and keys, one for each kind of layers; by
        default none."""
        return ()


class RotaryStage(DecoderStage):
    """One stage of a descendant of Llama; families override how attention and MLP are read."""

    config: RotaryConfig

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(self.config, dtype=self.dtype, device=self.device),)

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        return self.read_rms_norm(source, name, size)

    def read_rms_norm(self, source: TensorSource, name: str, size: int) -> RMSNorm:
        """Reads a norm that divides by the root mean square (RMSNorm)."""
        return RMSNorm(self.read_scale(source, name, size), self.config.rms_norm_eps)

    def read_scale(self, source: TensorSource, name: str, size: int) -> Tensor:
        """Reads the vector by which a norm multiplies, [size]; by default the stored weight."""
        return source.tensor(f"{name}.weight", size)

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        return PreNormLayer(
            self.read_norm(source, f"{prefix}.input_layernorm", hidden_size),
            self.read_attention(source, f"{prefix}.self_attn", index),
            self.read_norm(source, f"{prefix}.post_attention_layernorm", hidden_size),
            self.read_mlp(source, f"{prefix}.mlp", index),
        )

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        """Reads the attention of layer `index`. This default has no biases and no norms."""
        form = AttentionForm(window=self.config.layer_windows[index])
        return Attention.read(source, prefix, self.config, form=form)

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        """Reads the MLP of layer `index`. This default has no biases."""
        size = self.config.intermediate_size
        return GatedMLP.read(source, prefix, self.config, size=size)

    def read_head_norms(self, source: TensorSource, prefix: str) -> HeadNorms:
        """Reads the norms over single query heads and key heads. Only some families have such
        norms."""
        head_dim = self.config.head_dim
        return HeadNorms(
            self.read_scale(source, f"{prefix}.q_norm", head_dim),
            self.read_scale(source, f"{prefix}.k_norm", head_dim),
            self.config.rms_norm_eps,
        )
