"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with positions that begin after the id of the padding
token.

Both texts of a pair have the same token type. Only the separator tokens show where the second text
begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.models.config import JsonObject, TokenId, UnsupportedModel
from services.worker.models.families.bert import BertConfig, BertStage
from services.worker.models.score_heads import Affine, ScoreHead, TanhScores
from services.worker.models.weights import TensorSource

_PADDING = 1  # `pad_token_id` by default


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """Counterpart of Hugging Face's `RobertaConfig`."""

    architecture = "RobertaModel"
    distinguishes_texts = False
    default_eos_token_ids = (2,)
    read_keys = BertConfig.read_keys | {"pad_token_id"}

    padding_id: TokenId = _PADDING

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        given, n_positions = config.get("pad_token_id"), config.get("max_position_embeddings")
        padding = _PADDING if given is None else given
        if isinstance(padding, int) and isinstance(n_positions, int) and padding + 1 >= n_positions:
            raise UnsupportedModel(
                f"config.json: pad_token_id {padding} leaves none of {n_positions} positions"
            )
        return super().read(config) | {"padding_id": padding}

    @property
    def skipped_token_id(self) -> int:
        return self.padding_id

    @property
    def n_unused_positions(self) -> int:
        """Number of unused rows at the beginning of the table of positions: the first token of a
        text has the position `padding_id` + 1, as in fairseq."""
        return self.padding_id + 1


@dataclass(frozen=True, kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """Counterpart of Hugging Face's `XLMRobertaConfig`."""

    architecture = "XLMRobertaModel"


@dataclass(frozen=True, kw_only=True)
class CamembertConfig(RobertaConfig):
    """Counterpart of Hugging Face's `CamembertConfig`."""

    architecture = "CamembertModel"


class RobertaStage(BertStage):
    """One stage of a RoBERTa model."""

    config_type = RobertaConfig
    prefix = "roberta"
    embedding_name = "roberta.embeddings.word_embeddings.weight"
    layers_name = "roberta.encoder.layer"
    config: RobertaConfig

    def read_score_head(self, source: TensorSource, n_values: int) -> ScoreHead:
        size = self.config.hidden_size
        return TanhScores(
            Affine.read(source, "classifier.dense", n_in=size, n_out=size),
            Affine.read(source, "classifier.out_proj", n_in=size, n_out=n_values),
        )


class XLMRobertaStage(RobertaStage):
    """One stage of an XLM-RoBERTa model, such as BGE-M3 and BGE-Reranker."""

    config_type = XLMRobertaConfig
    config: XLMRobertaConfig


class CamembertStage(RobertaStage):
    """One stage of a CamemBERT model."""

    config_type = CamembertConfig
    config: CamembertConfig
