"""Ministral 3: Mistral whose queries are multiplied by a factor that depends on their position
(Mistral AI, 2025).

For position p and the original context length L, the factor is 1 + beta * log(1 + floor(p / L)),
where beta is the key `llama_4_scaling_beta`. So the factor is 1 within the original context, and
makes the attention of later positions a little sharper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels import AttentionForm
from kernels.program import Program
from kernels.steps import Buffer
from services.worker.models.config import (
    JsonObject,
    NonNegativeFloat,
    PositiveInt,
    UnsupportedModel,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Attention
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import EqualWindowsConfig

# Defaults of `Ministral3Config` for missing keys.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(EqualWindowsConfig):
    """Counterpart of Hugging Face's `Ministral3Config`."""

    architecture = "Ministral3ForCausalLM"
    default_eos_token_ids = (2,)
    read_keys = RotaryConfig.read_keys - {"rope_theta", "rope_scaling"}

    window: PositiveInt | None = field(default=None, metadata={"alias": "sliding_window"})
    query_growth: NonNegativeFloat  # `llama_4_scaling_beta`
    growth_length: PositiveInt  # number of positions with an equal factor

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        rope = dict(config.get("rope_parameters") or _DEFAULT_ROPE)
        rope.pop("max_position_embeddings", None)  # repeated outside of `rope_parameters`
        growth = rope.pop("llama_4_scaling_beta", None)
        length = rope.get("original_max_position_embeddings")
        if growth is None or length is None:
            raise UnsupportedModel(
                "config.json: rope_parameters lacks llama_4_scaling_beta or "
                "original_max_position_embeddings, by which queries grow"
            )
        return super().read({**_DEFAULTS, **config, "rope_parameters": rope}) | {
            "query_growth": growth,
            "growth_length": length,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingAttention(Attention):
    """Attention in which each query is multiplied by a factor that grows with its position."""

    factors: Tensor  # [n_lengths], of the type of queries
    length: int  # number of positions with an equal factor

    def describe_stored(self, to: Program, qkv: Buffer, layer: int) -> Buffer:
        qkv = Attention.describe_stored(self, to, qkv, layer)
        to.scale_by_position(qkv, self.n_heads * self.head_dim, self.factors, self.length)
        return qkv


class Ministral3Stage(RotaryStage):
    """One stage of a Ministral 3 model."""

    config_type = Ministral3Config
    config: Ministral3Config

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        form = AttentionForm(window=self.config.layer_windows[index])
        plain = Attention.read(source, prefix, self.config, form=form)
        return GrowingAttention.of(plain, factors=self._factors(), length=self.config.growth_length)

    def _factors(self) -> Tensor:
        """Returns the factors by which queries are multiplied, [n_lengths]: factor i is for the
        positions from i times to i + 1 times the original context length."""
        n_lengths = -(-self.config.max_position_embeddings // self.config.growth_length)
        factors = 1 + self.config.query_growth * torch.log1p(torch.arange(n_lengths).float())
        return factors.to(dtype=self.dtype, device=self.device)
