"""DeepSeek-V2: latent attention, and groups of experts in addition to shared experts (DeepSeek-AI,
2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kernels.forms.routing import RoutingForm
from kernels.packing.linear import pack
from services.worker.models.config import Count, JsonObject, PositiveFloat, PositiveInt, require
from services.worker.models.decoder_layers import MLP, GatedMLP
from services.worker.models.group_mixture import GroupMixture, GroupRouter
from services.worker.models.latent_attention import LatentConfig, LatentStage
from services.worker.models.mixture import read_expert_mlps
from services.worker.models.weights import TensorSource


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(LatentConfig):
    """Counterpart of Hugging Face's `DeepseekV2Config`."""

    architecture = "DeepseekV2ForCausalLM"
    default_eos_token_ids = (2,)
    read_keys = LatentConfig.read_keys | {
        "first_k_dense_replace", "moe_layer_freq", "n_group", "norm_topk_prob", "scoring_func",
        "topk_group", "topk_method",
    }  # fmt: skip
    # Keys about training, the division of experts in other programs, and the number of
    # additional layers that predict further tokens, which are not run.
    ignored_keys = frozenset((
        "aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers",
        "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "seq_aux",
    ))  # fmt: skip

    # The supported values of keys, the default first.
    computed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "moe_layer_freq": (1, None),
        "norm_topk_prob": (False, None),
        "rope_interleave": (True, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy"),
    }
    default_n_dense: ClassVar[int] = (
        0  # number of first layers without experts, `first_k_dense_replace`
    )
    default_groups: ClassVar[tuple[int, int]] = (1, 1)  # `n_group` and `topk_group`
    n_best: ClassVar[int] = 1  # number of best experts whose scores choose a group

    n_experts: Count = field(default=64, metadata={"alias": "n_routed_experts"})
    n_chosen: PositiveInt = field(metadata={"alias": "num_experts_per_tok"})
    n_shared: PositiveInt = field(default=2, metadata={"alias": "n_shared_experts"})
    expert_size: PositiveInt = field(default=1407, metadata={"alias": "moe_intermediate_size"})
    score_factor: PositiveFloat = field(default=1.0, metadata={"alias": "routed_scaling_factor"})
    n_groups: PositiveInt
    n_chosen_groups: PositiveInt
    are_sparse: tuple[bool, ...]  # whether each layer has experts instead of one MLP

    def check(self) -> None:
        super().check()
        size, rest = divmod(self.n_experts, self.n_groups)
        if rest or (self.n_groups > 1 and size < self.n_best):
            raise ValueError(
                f"n_routed_experts ({self.n_experts}) cannot be divided into n_group "
                f"({self.n_groups}) groups of {self.n_best} or more"
            )
        if self.n_chosen_groups > self.n_groups:
            raise ValueError(
                f"topk_group ({self.n_chosen_groups}) is more than n_group ({self.n_groups})"
            )
        if self.n_chosen > self.n_chosen_groups * size:
            raise ValueError(
                f"num_experts_per_tok ({self.n_chosen}) is more than the "
                f"{self.n_chosen_groups * size} experts of the groups that are chosen"
            )

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, **cls.computed)
        given = [config.get(key) for key in ("n_group", "topk_group")]
        n_groups, n_chosen_groups = (
            default if n is None else n
            for n, default in zip(given, cls.default_groups, strict=True)
        )
        if config.get("topk_method", cls.computed["topk_method"][0]) == "greedy":
            n_groups = n_chosen_groups = 1
        n_dense = config.get("first_k_dense_replace")
        n_dense = cls.default_n_dense if n_dense is None else n_dense
        return super().read(config) | {
            "n_groups": n_groups,
            "n_chosen_groups": n_chosen_groups,
            "are_sparse": tuple(i >= n_dense for i in range(config.get("num_hidden_layers") or 0)),
        }


class DeepseekV2Stage(LatentStage):
    """One stage of a DeepSeek-V2 model."""

    config_type = DeepseekV2Config
    config: DeepseekV2Config

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        config = self.config
        if not config.are_sparse[index]:
            return super().read_mlp(source, prefix, index)
        size = config.n_shared * config.expert_size
        return GroupMixture(
            self.read_router(source, f"{prefix}.gate"),
            read_expert_mlps(
                source,
                f"{prefix}.experts",
                hidden_size=config.hidden_size,
                size=config.expert_size,
                n_experts=config.n_experts,
            ),
            GatedMLP.read(source, f"{prefix}.shared_experts", config, size=size),
        )

    def read_router(self, source: TensorSource, prefix: str) -> GroupRouter:
        """Reads the router of the experts. In this family the router computes a softmax over the
        scores of all experts. DeepSeek-V3 overrides this method."""
        config = self.config
        weight = source.tensor(f"{prefix}.weight", config.n_experts, config.hidden_size)
        return GroupRouter(
            pack(weight.float()),
            RoutingForm(
                n_chosen=config.n_chosen,
                is_softmax=True,
                normalises=False,
                factor=config.score_factor,
                n_groups=config.n_groups,
                n_chosen_groups=config.n_chosen_groups,
                n_best=config.n_best if config.n_groups > 1 else 1,
            ),
        )
