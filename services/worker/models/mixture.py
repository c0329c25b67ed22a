"""A mixture of experts in place of an MLP: every token passes only through the few experts that a
router scores highest for it.

Ranks that share a layer divide the inner size of each expert, not the list of experts. So all ranks
have equal work, whichever experts are chosen, and one sum over the ranks ends the layer, as after
any other MLP. All ranks choose the same experts without communication, because all have the same
hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kernels.packing.linear import pack
from kernels.program import Program
from kernels.steps import Buffer, ExpertMatrices
from kernels.weights.linear import LinearWeight
from services.worker.models.decoder_layers import GatedMLP
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.tensor_parallel import even_share
from services.worker.models.weights import Part, Shard, TensorSource

Names = tuple[str, str, str]
"""Names of an expert's matrices: gate, up and down."""

GATE_UP_DOWN: Names = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated MLP through which every token passes. Its result is multiplied by the sigmoid of a
    second gate."""

    mlp: GatedMLP  # this rank's share
    gate: LinearWeight  # [1, hidden]

    @classmethod
    def read(cls, source: TensorSource, prefix: str, mlp: GatedMLP, *, hidden_size: int) -> Self:
        """Reads the gate `shared_expert_gate` under `prefix`; `mlp` is the shared expert."""
        gate = source.tensor(f"{prefix}.shared_expert_gate.weight", 1, hidden_size)
        return cls(mlp, pack(gate))

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds the steps of this expert to a program, and returns the summand that this rank
        contributes, [n_tokens, hidden]."""
        changed = self.mlp.describe_share(to, x)
        return to.sigmoid_and_mul(to.multiply(self.gate, x), changed)


@dataclass(frozen=True, slots=True)
class ExpertMixture:
    """A mixture of gated MLPs: the weighted sum of the experts that a linear router scores highest
    for a token."""

    router: LinearWeight  # [n_experts, hidden]
    experts: ExpertMatrices  # this rank's share
    n_chosen: int
    normalises: bool  # whether the weights of the chosen experts add up to one
    shared: SharedExpert | None = None  # for every token, besides the chosen experts
    router_bias: Tensor | None = None  # [n_experts]

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps to a program, as `MLP.describe` specifies."""
        # As in transformers: scores are in the model's element type, later steps in float32.
        scores = to.multiply(self.router, x, self.router_bias)
        experts, weights = to.route(scores, self.n_chosen, normalises=self.normalises)
        out = to.run_experts(self.experts, x, experts, weights)
        if self.shared is not None:
            out = to.add(out, self.shared.describe(to, x))
        to.all_reduce(out)
        return out if residual is None else to.add(residual, out)


def read_experts(
    source: TensorSource,
    prefix: str,
    config: MixtureConfig,
    *,
    size: int,
    normalises: bool,
    names: Names = GATE_UP_DOWN,
    shared: SharedExpert | None = None,
) -> ExpertMixture:
    """Reads a mixture under `prefix`: the router `gate`, and the experts, each of inner size
    `size`."""
    router = source.tensor(f"{prefix}.gate.weight", config.n_experts, config.hidden_size)
    mlps = read_expert_mlps(
        source,
        f"{prefix}.experts",
        names=names,
        hidden_size=config.hidden_size,
        size=size,
        n_experts=config.n_experts,
    )
    return ExpertMixture(pack(router), mlps, config.n_chosen, normalises, shared)


def read_expert_mlps(
    source: TensorSource,
    prefix: str,
    *,
    hidden_size: int,
    size: int,
    n_experts: int,
    names: Names = GATE_UP_DOWN,
) -> ExpertMatrices:
    """Reads this rank's share of the experts 0, 1, ... under `prefix`, of inner size `size`."""
    share = even_share(size, source.tp_rank, source.tp_size, what=f"inside of {prefix}")
    gate, up, down = names
    experts = [f"{prefix}.{i}" for i in range(n_experts)]
    gate_up = [
        [
            Part(f"{expert}.{name}.weight", (size, hidden_size), Shard(0, share))
            for name in (gate, up)
        ]
        for expert in experts
    ]
    downs = [
        Part(f"{expert}.{down}.weight", (hidden_size, size), Shard(1, share)) for expert in experts
    ]
    return source.experts(gate_up, downs)
