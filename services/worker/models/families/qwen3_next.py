"""Qwen3-Next: three layers in four keep a state (Gated DeltaNet), and all layers have experts
(Qwen, 2025).

Norms scale by one plus the stored weight, a quarter of each head is rotated, and the output of
attention is multiplied by gates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels import HeadNorms
from services.worker.models.config import (
    Count,
    JsonObject,
    KVSizes,
    PositiveInt,
    StateSizes,
    UnsupportedModel,
    require,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, GatedMLP, Layer, Mixer, PreNormLayer
from services.worker.models.hybrid import (
    DeltaNetShape,
    DeltaNetShare,
    GatedAttention,
    GatedDeltaNet,
)
from services.worker.models.layers import ColumnParallelLinear
from services.worker.models.mixture import SharedExpert, read_experts
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.rope import head_order
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.sparse_layers import SparseLayers
from services.worker.models.weights import TensorSource

_LINEAR, _FULL = "linear_attention", "full_attention"
_DEFAULT_INTERVAL = 4  # every fourth layer has full attention


@dataclass(frozen=True, kw_only=True)
class HybridConfig(RotaryConfig):
    """The fields that configurations of Qwen3-Next and later hybrids share."""

    read_keys = RotaryConfig.read_keys | {
        "layer_types", "full_attention_interval", "attn_output_gate", "mamba_ssm_dtype",
    }  # fmt: skip
    # Additional layers that draft further tokens, which are not run.
    ignored_keys = frozenset(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"))
    default_partial_rotary_factor = 0.25
    # Defaults for missing keys.
    default_head_dim: ClassVar[int] = 256

    attention_bias: bool = False
    n_key_heads: PositiveInt = field(default=16, metadata={"alias": "linear_num_key_heads"})
    n_value_heads: PositiveInt = field(default=32, metadata={"alias": "linear_num_value_heads"})
    key_dim: PositiveInt = field(default=128, metadata={"alias": "linear_key_head_dim"})
    value_dim: PositiveInt = field(default=128, metadata={"alias": "linear_value_head_dim"})
    kernel_size: PositiveInt = field(default=4, metadata={"alias": "linear_conv_kernel_dim"})
    linear_layers: tuple[bool, ...]  # whether each layer keeps a state instead of keys

    def check(self) -> None:
        super().check()
        if self.n_value_heads % self.n_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.n_value_heads}) is not a multiple of "
                f"linear_num_key_heads ({self.n_key_heads})"
            )
        if all(self.linear_layers):
            raise ValueError(f"layer_types names no layer of {_FULL}")

    @property
    def delta_net(self) -> DeltaNetShape:
        """The head counts and sizes of the Gated DeltaNet layers."""
        return DeltaNetShape(
            self.n_key_heads, self.n_value_heads, self.key_dim, self.value_dim, self.kernel_size
        )

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        stored = KVSizes(self.n_kv_heads, self.head_dim, self.head_dim)
        return [KVSizes(0, 0, 0) if is_linear else stored for is_linear in self.linear_layers]

    @property
    def layer_states(self) -> Sequence[StateSizes | None]:
        kept = self.delta_net.states
        return [kept if is_linear else None for is_linear in self.linear_layers]

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, attn_output_gate=(True, None), mamba_ssm_dtype=("float32", None))
        given = {key: value for key, value in config.items() if value is not None}
        default = {"head_dim": cls.default_head_dim}
        return super().read({**default, **given}) | {"linear_layers": _linear(config)}


def _linear(config: JsonObject) -> tuple[bool, ...]:
    """Returns, for each layer, whether it keeps a recurrent state. Raises UnsupportedModel for
    unknown kinds of layers."""
    n_layers, kinds = config.get("num_hidden_layers") or 0, config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval") or _DEFAULT_INTERVAL
        return tuple((i + 1) % interval != 0 for i in range(n_layers))
    unknown = set(kinds) - {_LINEAR, _FULL}
    if unknown or len(kinds) != n_layers:
        raise UnsupportedModel(
            f"config.json: layer_types has {len(kinds)} entries for {n_layers} layers, of unknown "
            f"types {sorted(unknown)}"
        )
    return tuple(kind == _LINEAR for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class SparseHybridConfig(MixtureConfig, HybridConfig):
    """The fields that configurations of hybrid models with experts share."""

    # Both matter to training only.
    ignored_keys = HybridConfig.ignored_keys | {"output_router_logits", "router_aux_loss_coef"}

    n_experts: Count = field(metadata={"alias": "num_experts"})
    n_chosen: PositiveInt = field(metadata={"alias": "num_experts_per_tok"})
    expert_size: PositiveInt = field(default=512, metadata={"alias": "moe_intermediate_size"})
    shared_expert_size: PositiveInt = field(
        default=512, metadata={"alias": "shared_expert_intermediate_size"}
    )


class HybridStage(RotaryStage):
    """One stage of a hybrid model. Families override how projections and MLPs are read."""

    config: HybridConfig

    def read_scale(self, source: TensorSource, name: str, size: int) -> Tensor:
        return 1 + super().read_scale(source, name, size).float()  # kept in float32

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        read_mixer = self._read_delta_net if self.config.linear_layers[index] else self._read_full
        return PreNormLayer(
            self.read_norm(source, f"{prefix}.input_layernorm", hidden_size),
            read_mixer(source, prefix),
            self.read_norm(source, f"{prefix}.post_attention_layernorm", hidden_size),
            self.read_mlp(source, f"{prefix}.mlp", index),
        )

    @abstractmethod
    def read_delta_inputs(
        self, source: TensorSource, prefix: str, share: DeltaNetShare
    ) -> ColumnParallelLinear:
        """Reads the projection from hidden states to this rank's queries, keys, values, z, b and a
        (see `Ops.delta_net`)."""

    def _read_delta_net(self, source: TensorSource, prefix: str) -> Mixer:
        prefix = f"{prefix}.linear_attn"
        share = DeltaNetShare.of(self.config.delta_net, source)
        return GatedDeltaNet.read(
            source,
            prefix,
            self.read_delta_inputs(source, prefix, share),
            share,
            hidden_size=self.config.hidden_size,
            eps=self.config.rms_norm_eps,
        )

    def _read_full(self, source: TensorSource, prefix: str) -> Mixer:
        prefix = f"{prefix}.self_attn"
        order = head_order(self.config) or range(self.config.head_dim)
        norms = self.read_head_norms(source, prefix)
        return GatedAttention.read(
            source,
            prefix,
            self.config,
            order=order,
            has_bias=self.config.attention_bias,
            head_norms=HeadNorms(norms.q[list(order)], norms.k[list(order)], norms.eps),
        )

    def read_mixture(
        self,
        source: TensorSource,
        prefix: str,
        config: SparseHybridConfig,
        *,
        normalises: bool,
    ) -> MLP:
        """Reads a mixture of experts with a shared expert."""
        hidden_size, size = self.config.hidden_size, config.shared_expert_size
        shared = GatedMLP.read(source, f"{prefix}.shared_expert", self.config, size=size)
        return read_experts(
            source,
            prefix,
            config,
            size=config.expert_size,
            normalises=normalises,
            shared=SharedExpert.read(source, prefix, shared, hidden_size=hidden_size),
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(SparseLayers, SparseHybridConfig):
    """Counterpart of Hugging Face's `Qwen3NextConfig`."""

    architecture = "Qwen3NextForCausalLM"
    default_n_kv_heads = 2

    n_experts: Count = field(default=512, metadata={"alias": "num_experts"})
    n_chosen: PositiveInt = field(default=10, metadata={"alias": "num_experts_per_tok"})
    normalises: bool = field(default=True, metadata={"alias": "norm_topk_prob"})


class Qwen3NextStage(HybridStage):
    """One stage of a Qwen3-Next model."""

    config_type = Qwen3NextConfig
    config: Qwen3NextConfig

    def read_delta_inputs(
        self, source: TensorSource, prefix: str, share: DeltaNetShare
    ) -> ColumnParallelLinear:
        # One matrix stores, for each key head, the query, the key, and the values and z of the
        # value heads that share the key head. Another matrix stores b and a of these value heads.
        shape, n_groups = share.shape, len(share.key_heads)
        n_values, n_heads = shape.group_size * shape.value_dim, shape.group_size
        kinds = (shape.key_dim, shape.key_dim, n_values, n_values)
        n_of_group = sum(kinds)
        gates = n_groups * n_of_group + _rows_by_kind(n_groups, (n_heads, n_heads))
        return ColumnParallelLinear.read(
            source,
            [f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"],
            n_in=self.config.hidden_size,
            n_out=(shape.n_key_heads * n_of_group, 2 * shape.n_value_heads),
            shares=(share.scaled(n_of_group), share.scaled(2 * n_heads)),
            has_bias=False,
            order=torch.cat((_rows_by_kind(n_groups, kinds), gates)),
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        if not self.config.is_sparse(index):
            return super().read_mlp(source, prefix, index)
        return self.read_mixture(source, prefix, self.config, normalises=self.config.normalises)


def _rows_by_kind(n_groups: int, kinds: Sequence[int]) -> Tensor:
    """Returns the indices that reorder stored rows by their kind, such as query, key or value.

    The file has all rows of the first group, then all rows of the second group, and so on. In each
    group, rows of a kind are consecutive; `kinds` has their number for each kind. The result has
    the rows of the first kind in all groups, then the rows of the second kind, and so on.
    """
    groups = torch.arange(n_groups * sum(kinds)).view(n_groups, -1)
    return torch.cat([rows.flatten() for rows in torch.split(groups, list(kinds), 1)])
