"""A mixture of experts in place of an MLP: every token goes through the few that it chooses.

Ranks that share a layer divide each expert's inside and not the experts: all have the same work,
whatever is chosen, and one sum puts it together, as after any other MLP. That all ranks choose the
same experts needs no message, since they see the same hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels import Ops
from kernels.expert_mlp import ExpertMLP
from kernels.layer import GatedMLPWeights
from kernels.packed_linear import LinearWeight, pack
from services.worker.models.tensor_parallel import TensorParallel, even_share
from services.worker.models.weights import Part, Shard, TensorSource


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated MLP that every token goes through, as far as a gate of its own lets it."""

    mlp: GatedMLPWeights  # this rank's share
    gate: Tensor  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns this rank's share of the result, [n_tokens, hidden]."""
        return F.linear(x, self.gate).sigmoid() * self.mlp.down.weight(self.mlp.gate_up(x))


@dataclass(frozen=True, slots=True)
class ExpertMixture:
    """The weighted sum of the gated MLPs that a linear router scores highest for a token."""

    router: LinearWeight  # [n_experts, hidden]
    experts: ExpertMLP  # this rank's share
    n_chosen: int
    normalises: bool  # the weights of those chosen add up to one
    shared: SharedExpert | None = None  # beside those chosen
    router_bias: Tensor | None = None  # [n_experts]

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        # As in transformers: scores in the model's element type, everything after in float32.
        shares = self.router(x, self.router_bias).float().softmax(-1)  # [n_tokens, n_experts]
        weights, experts = shares.topk(self.n_chosen)  # [n_tokens, n_chosen]
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self.experts(x, experts, weights)
        if self.shared is not None:
            out += self.shared(x)
        ranks.all_reduce(out)
        return out if residual is None else out.add_(residual)  # [n_tokens, hidden]


def read_experts(
    source: TensorSource,
    prefix: str,
    *,
    names: tuple[str, str, str],  # of gate, up and down
    hidden_size: int,
    size: int,
    n_experts: int,
    n_chosen: int,
    normalises: bool,
    ops: Ops,
    shared: SharedExpert | None = None,
) -> ExpertMixture:
    """Reads the router `gate` and the experts under `prefix`, each `size` wide inside."""
    router = source.tensor(f"{prefix}.gate.weight", n_experts, hidden_size)
    share = even_share(size, source.tp_rank, source.tp_size, what=f"inside of {prefix}.experts")
    gate, up, down = names
    experts = [f"{prefix}.experts.{i}" for i in range(n_experts)]
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
    mlps = source.experts(gate_up, downs, ops)
    return ExpertMixture(pack(router), mlps, n_chosen, normalises, shared)
