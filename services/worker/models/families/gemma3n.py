"""Gemma 3n, text only: Gemma 3 with several residual streams and inputs for each layer (2025).

A layer computes one of several residual streams (`residual_streams`). The output of attention is
added to a low-rank product (Laurel). The MLPs of the first layers set all gates but the largest
ones to zero (`sparse_mlp`). The last layers attend to keys and values of earlier layers
(`shared_kv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.weights.linear import LinearWeight
from services.worker.models.config import (
    Count,
    JsonObject,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    read_windows,
)
from services.worker.models.decoder_layers import MLP, Embedding, Head, Layer, Norm
from services.worker.models.families.shared_kv import SharedKVConfig, SharedKVStage
from services.worker.models.per_layer_inputs import whole_weight
from services.worker.models.residual_streams import (
    AltUp,
    Laurel,
    StreamsEmbedding,
    StreamsHead,
    StreamsLayer,
)
from services.worker.models.sparse_mlp import SparseMLP
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharedKVConfig):
    """Counterpart of Hugging Face's `Gemma3nTextConfig`."""

    architecture = "Gemma3nForCausalLM"
    default_eos_token_ids = (1,)
    read_keys = SharedKVConfig.read_keys | {
        "rope_local_base_freq", "intermediate_size", "activation_sparsity_pattern",
    }  # fmt: skip
    # The first two matter to training only; the scores of these models are not scaled.
    ignored_keys = frozenset(("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"))

    final_logit_softcapping: PositiveFloat | None = 30.0
    n_shared_layers: NonNegativeInt = field(default=15, metadata={"alias": "num_kv_shared_layers"})
    n_streams: Count = field(default=4, metadata={"alias": "altup_num_inputs"})
    active_stream: NonNegativeInt = field(default=0, metadata={"alias": "altup_active_idx"})
    scales_corrected: bool = field(default=True, metadata={"alias": "altup_correct_scale"})
    laurel_rank: PositiveInt = 64
    intermediate_sizes: tuple[PositiveInt, ...]  # of each layer
    sparsities: tuple[NonNegativeFloat, ...]  # share of gates set to zero, for each layer

    def check(self) -> None:
        super().check()
        if self.active_stream >= self.n_streams:
            raise ValueError(
                f"altup_active_idx ({self.active_stream}) is not below altup_num_inputs "
                f"({self.n_streams})"
            )
        if self.per_layer_size == 0:
            raise ValueError("hidden_size_per_layer_input is 0")
        for key, values in (
            ("intermediate_size", self.intermediate_sizes),
            ("activation_sparsity_pattern", self.sparsities),
        ):
            if len(values) != self.n_layers:
                raise ValueError(f"{key} has {len(values)} entries for {self.n_layers} layers")
        if max(self.sparsities) >= 1:
            raise ValueError(f"activation_sparsity_pattern has {max(self.sparsities)}, no share")

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        n_layers = config.get("num_hidden_layers") or 0
        sizes = config.get("intermediate_size", 16_384)
        if isinstance(sizes, int):
            sizes = [sizes] * n_layers
        sparsities = config.get("activation_sparsity_pattern")
        if sparsities is None:
            sparsities = [0.95 if i < 10 < n_layers else 0.0 for i in range(n_layers)]
        sliding = [(i + 1) % 5 != 0 for i in range(n_layers)]
        window = config.get("sliding_window", 512)
        given = {"num_key_value_heads": 2, **config}
        return cls.read_shared(given, config.get("rope_parameters")) | {
            "windows": read_windows(config, window=window, default=sliding),
            "intermediate_size": max(sizes),
            "intermediate_sizes": sizes,
            "sparsities": sparsities,
        }


class Gemma3nStage(SharedKVStage):
    """One stage of a Gemma 3n text model."""

    config_type = Gemma3nConfig
    config: Gemma3nConfig

    @property
    def stream_size(self) -> int:
        return self.config.n_streams * self.config.hidden_size

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        projections = self._read_projections(source, "model.altup_projections")
        return StreamsEmbedding(self.scaled(tokens), projections, self.read_per_layer_table(source))

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        size, rank = self.config.hidden_size, self.config.laurel_rank

        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}", size)

        laurel = Laurel(
            whole_weight(source, f"{prefix}.laurel.linear_left", rank, size),
            whole_weight(source, f"{prefix}.laurel.linear_right", size, rank),
            norm("laurel.post_laurel_norm"),
        )
        scale = source.tensor(f"{prefix}.altup.correct_output_scale", size)
        altup = AltUp.read(
            source,
            f"{prefix}.altup",
            norm=norm("altup.router_norm"),
            hidden_size=size,
            n_streams=self.config.n_streams,
            active=self.config.active_stream,
        )
        return StreamsLayer(
            altup,
            norm("input_layernorm"),
            laurel,
            self.read_attention(source, f"{prefix}.self_attn", index),
            norm("post_attention_layernorm"),
            norm("pre_feedforward_layernorm"),
            self.read_mlp(source, f"{prefix}.mlp", index),
            norm("post_feedforward_layernorm"),
            self.read_per_layer_gate(source, prefix, index),
            scale if self.config.scales_corrected else None,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        sparsity = self.config.sparsities[index]
        if not sparsity:
            return super().read_mlp(source, prefix, index)
        return SparseMLP.read(
            source,
            prefix,
            hidden_size=self.config.hidden_size,
            size=self.mlp_size(index),
            sparsity=sparsity,
        )

    def mlp_size(self, index: int) -> int:
        return self.config.intermediate_sizes[index]

    def read_head(self, source: TensorSource) -> Head:
        projections = self._read_projections(source, "model.altup_unembed_projections")
        return StreamsHead(super().read_head(source), projections, self.config.hidden_size)

    def _read_projections(self, source: TensorSource, name: str) -> Sequence[LinearWeight]:
        size, n = self.config.hidden_size, self.config.n_streams - 1
        return [whole_weight(source, f"{name}.{i}", size, size) for i in range(n)]
