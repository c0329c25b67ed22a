"""Gemma 4, text only: layers with and without a window differ in the number and size of their heads
(Google, 2026).

In some models, the keys of layers without a window are also their values. Each size of the model
has additional parts: the small models (E2B, E4B) have per-layer inputs and shared keys and values,
and one model (26B-A4B) has experts in addition to a dense MLP. Checkpoints without encoders of
images and sounds are called unified (12B), and compute the same as other Gemma 4 checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.forms.experts import ExpertForm
from kernels.packing.experts import pack_experts
from kernels.packing.linear import pack
from kernels.program import Program
from kernels.steps import Buffer, ExpertMatrices
from kernels.weights.linear import LinearWeight
from services.worker.models.config import (
    Count,
    JsonObject,
    ModelConfig,
    PositiveInt,
    UnsupportedModel,
    read_windows,
    require,
)
from services.worker.models.decoder_layers import MLP, Embedding, Head, Layer, NoNorm, Norm
from services.worker.models.families.shared_kv import SharedKVConfig, SharedKVStage
from services.worker.models.layer_forms import SandwichLayer
from services.worker.models.normed_attention import Projected
from services.worker.models.per_layer_inputs import HeadWithoutInputs, PerLayerGate, PerLayerTable
from services.worker.models.tensor_parallel import even_share
from services.worker.models.weights import Shard, TensorSource

# Defaults of `Gemma4TextConfig` for missing keys.
_DEFAULT_ROPE: JsonObject = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}
_DEFAULT_FULL_HEAD_DIM = 512

_OVERRIDDEN = frozenset(("head_dim", "num_key_value_heads"))  # settings of layers without a window


@dataclass(frozen=True, slots=True)
class Experts:
    """The sizes of a layer's experts."""

    n: int
    n_chosen: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharedKVConfig):
    """Counterpart of Hugging Face's `Gemma4TextConfig`.

    `head_dim` and `n_kv_heads` apply to layers with a window only.
    """

    architecture = "Gemma4ForCausalLM"
    default_eos_token_ids = (1,)
    read_keys = SharedKVConfig.read_keys | {
        "global_head_dim", "num_global_key_value_heads", "per_layer_config",
        "use_bidirectional_attention",
    }  # fmt: skip
    default_window: ClassVar[int] = 512

    full_head_dim: PositiveInt
    full_n_kv_heads: PositiveInt
    keys_are_values: bool = field(default=False, metadata={"alias": "attention_k_eq_v"})
    widens_shared: bool = field(default=False, metadata={"alias": "use_double_wide_mlp"})
    has_experts: bool = field(default=False, metadata={"alias": "enable_moe_block"})
    n_experts: Count | None = field(default=None, metadata={"alias": "num_experts"})
    n_chosen: PositiveInt | None = field(default=None, metadata={"alias": "top_k_experts"})
    expert_size: PositiveInt | None = field(
        default=None, metadata={"alias": "moe_intermediate_size"}
    )

    @property
    def full(self) -> Self:
        return replace(self, head_dim=self.full_head_dim, n_kv_heads=self.full_n_kv_heads)

    @property
    def experts(self) -> Experts | None:
        """The sizes of the experts of a layer, or None for a model without experts. Raises
        ValueError if a size is missing."""
        if not self.has_experts:
            return None
        if self.n_experts is None or self.n_chosen is None or self.expert_size is None:
            raise ValueError(
                "enable_moe_block without num_experts, top_k_experts and moe_intermediate_size"
            )
        return Experts(self.n_experts, self.n_chosen, self.expert_size)

    def check(self) -> None:
        super().check()
        experts = self.experts
        if experts is not None and experts.n_chosen > experts.n:
            raise ValueError(
                f"top_k_experts ({experts.n_chosen}) is more than num_experts ({experts.n})"
            )
        if self.per_layer_size and self.per_layer_vocab_size < self.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input ({self.per_layer_vocab_size}) is less than "
                f"vocab_size ({self.vocab_size})"
            )

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        # "vision" means that only images are attended to in both directions.
        require(config, use_bidirectional_attention=("vision", None))
        n_layers = config.get("num_hidden_layers") or 0
        windows = read_windows(
            config,
            window=config.get("sliding_window", cls.default_window),
            default=[(i + 1) % 6 != 0 for i in range(n_layers)],
        )
        windows = (*windows[:-1], None)  # the last layer never has a window
        given = {"num_key_value_heads": 4, **config}
        fields = cls.read_shared(given, config.get("rope_parameters") or _DEFAULT_ROPE)
        own = _read_full_heads(config, [i for i, window in enumerate(windows) if window is None])
        return fields | {
            "windows": windows,
            "full_head_dim": own.get("head_dim", fields["head_dim"]),
            "full_n_kv_heads": own.get("num_key_value_heads", fields["n_kv_heads"]),
        }


def _read_full_heads(config: JsonObject, full_layers: list[int]) -> JsonObject:
    """Returns the settings `head_dim` and `num_key_value_heads` of layers without a window. A
    setting is missing in the result if the file has no special value for these layers.

    Files of `transformers` 5.23 and later list these settings for each layer. Raises
    UnsupportedModel if layers without a window differ from each other.
    """
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        own = {"head_dim": config.get("global_head_dim", _DEFAULT_FULL_HEAD_DIM)}
        n_kv_heads = config.get("num_global_key_value_heads")
        if config.get("attention_k_eq_v") and n_kv_heads is not None:
            own["num_key_value_heads"] = n_kv_heads
        return own
    own, *others = (by_layer.get(str(i)) or {} for i in full_layers)
    is_known = by_layer.keys() <= {str(i) for i in full_layers} and own.keys() <= _OVERRIDDEN
    if not is_known or any(each != own for each in others):
        raise UnsupportedModel(
            "config.json: per_layer_config is not the same head_dim and num_key_value_heads for "
            "all layers of full_attention, and nothing else"
        )
    return own


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(Gemma4Config):
    """Counterpart of Hugging Face's `Gemma4UnifiedTextConfig`."""

    architecture = "Gemma4UnifiedForCausalLM"
    default_eos_token_ids = (1,)
    default_window = 1024

    per_layer_size: int = 0

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, enable_moe_block=(False, None), hidden_size_per_layer_input=(0, None))
        return super().read(config)


@dataclass(frozen=True, slots=True)
class EmbeddingWithInputs:
    """Embeds tokens and appends the per-layer inputs of all layers to each row."""

    tokens: Embedding
    per_layer: PerLayerTable

    def describe(self, to: Program) -> Buffer:
        embedded = self.tokens.describe(to)
        return to.join(embedded, self.per_layer.describe(to, embedded))


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """A layer with norms before and after attention, and before and after the MLP. The layer's
    output is multiplied by a scale."""

    layer: SandwichLayer
    scale: Tensor  # [1]

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        return to.scale_by(self.layer.describe(to, hidden, layer), self.scale)


@dataclass(frozen=True, slots=True)
class LayerWithInputs:
    """A layer with norms before and after attention and the MLP, followed by the gated per-layer
    inputs.

    The gated inputs are added to the hidden states, and the sum is multiplied by a scale.
    """

    layer: SandwichLayer
    per_layer: PerLayerGate
    scale: Tensor  # [1]
    size: int  # of the residual stream, which begins a row

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        stream = self.layer.describe(to, to.take_part(hidden, 0, self.size), layer)
        stream = to.add(stream, self.per_layer.describe(to, stream, hidden))
        to.copy_part(to.scale_by(stream, self.scale), 0, self.size, hidden, 0)
        return hidden


@dataclass(frozen=True, slots=True)
class ScaledRouter:
    """A router that scores experts from the normalised hidden states times a scale.

    The weight of each chosen expert is multiplied by a scale of that expert.
    """

    norm: Norm
    scale: Tensor  # [hidden]
    factor: float
    weight: LinearWeight  # [n_experts, hidden]
    expert_scales: Tensor  # [n_experts]
    n_chosen: int

    def describe(self, to: Program, x: Buffer) -> tuple[Buffer, Buffer]:
        """Adds the steps of this router to a program, and returns the indices and the weights of
        the chosen experts, [n_tokens, n_chosen] each."""
        experts = to.buffer(self.n_chosen, torch.int64)
        weights = to.buffer(self.n_chosen, torch.float32)
        scaled = to.buffer(x.width)
        normed = self.norm.describe(to, x)
        to.call("scaled direction", lambda x: x * self.scale * self.factor, (normed,), scaled)
        scores = to.multiply(self.weight, scaled)
        to.call("chosen experts", self._chosen, (scores,), experts, weights)
        return experts, weights

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices of the chosen experts and their weights, [n_tokens, n_chosen]
        each."""
        weights, experts = scores.float().softmax(-1).topk(self.n_chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights * self.expert_scales[experts]


@dataclass(frozen=True, slots=True)
class DenseBesideExperts:
    """Adds the outputs of a dense MLP and of a mixture of experts.

    Both have the same input `x`. Each has a norm before it and a norm after it.
    """

    dense_norm: Norm
    dense: MLP
    dense_out_norm: Norm
    router: ScaledRouter
    experts_norm: Norm
    experts: ExpertMatrices  # this rank's share
    experts_out_norm: Norm

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps to a program, as `MLP.describe` specifies."""
        dense = self.dense.describe(to, self.dense_norm.describe(to, x))
        out = self.dense_out_norm.describe(to, dense)
        experts, weights = self.router.describe(to, x)
        inputs = self.experts_norm.describe(to, x)
        mixed = to.all_reduce(to.run_experts(self.experts, inputs, experts, weights))
        out = to.add(out, self.experts_out_norm.describe(to, mixed))
        return out if residual is None else to.add(residual, out)


class Gemma4Stage(SharedKVStage):
    """One stage of a Gemma 4 text model."""

    config_type: ClassVar[type[ModelConfig]] = Gemma4Config
    config: Gemma4Config

    def projected(self, index: int) -> Projected:
        projected = super().projected(index)
        is_full = self.config.layer_windows[index] is None
        if projected == "qkv" and self.config.keys_are_values and is_full:
            return "qk"
        return projected

    def mlp_size(self, index: int) -> int:
        is_shared = self.config.kv_sources[index] != index
        return self.config.intermediate_size * (2 if self.config.widens_shared and is_shared else 1)

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        scaled = self.scaled(tokens)
        if not self.config.per_layer_size:
            return scaled
        return EmbeddingWithInputs(scaled, self.read_per_layer_table(source))

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        size, experts = self.config.hidden_size, self.config.experts

        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}_layernorm", size)

        mlp_norm = norm("pre_feedforward")
        mlp = self.read_mlp(source, f"{prefix}.mlp", index)
        if experts is not None:
            mlp = self._beside_experts(source, prefix, experts, mlp_norm, mlp)
            mlp_norm = NoNorm()  # `DenseBesideExperts` has the norms
        layer = SandwichLayer(
            norm("input"),
            self.read_attention(source, f"{prefix}.self_attn", index),
            norm("post_attention"),
            mlp_norm,
            mlp,
            norm("post_feedforward"),
        )
        scale = source.tensor(f"{prefix}.layer_scalar", 1)
        if not self.config.per_layer_size:
            return Gemma4Layer(layer, scale)
        return LayerWithInputs(layer, self.read_per_layer_gate(source, prefix, index), scale, size)

    def read_head(self, source: TensorSource) -> Head:
        head = super().read_head(source)
        return HeadWithoutInputs(head, self.stream_size) if self.config.per_layer_size else head

    def _beside_experts(
        self, source: TensorSource, prefix: str, experts: Experts, dense_norm: Norm, dense: MLP
    ) -> DenseBesideExperts:
        size = self.config.hidden_size

        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}", size)

        router = ScaledRouter(
            self.plain_norm(size),
            source.tensor(f"{prefix}.router.scale", size),
            size**-0.5,
            pack(source.tensor(f"{prefix}.router.proj.weight", experts.n, size)),
            source.tensor(f"{prefix}.router.per_expert_scale", experts.n),
            experts.n_chosen,
        )
        return DenseBesideExperts(
            dense_norm,
            dense,
            norm("post_feedforward_layernorm_1"),
            router,
            norm("pre_feedforward_layernorm_2"),
            self._read_experts(source, f"{prefix}.experts", experts),
            norm("post_feedforward_layernorm_2"),
        )

    def _read_experts(self, source: TensorSource, prefix: str, experts: Experts) -> ExpertMatrices:
        """Reads this rank's share of every expert: a range of the expert's inner elements."""
        n, size, hidden_size = experts.n, experts.size, self.config.hidden_size
        share = even_share(size, source.tp_rank, source.tp_size, what=f"inside of {prefix}")
        name = f"{prefix}.gate_up_proj"
        gates, ups = (
            source.tensor(
                name, n, 2 * size, hidden_size, shard=Shard(1, range(at, at + len(share)))
            )
            for at in (share.start, size + share.start)
        )
        down = source.tensor(f"{prefix}.down_proj", n, hidden_size, size, shard=Shard(2, share))
        return pack_experts(torch.cat((gates, ups), 1), down, ExpertForm(gate="gelu_tanh"))


class Gemma4UnifiedStage(Gemma4Stage):
    """One stage of a unified Gemma 4 text model."""

    config_type = Gemma4UnifiedConfig
