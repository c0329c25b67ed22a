"""A mixture of experts in place of an MLP: every token goes through the few that it chooses.

Ranks that share a layer divide each expert's inside and not the experts: all have the same work,
whatever is chosen, and one sum puts it together, as after any other MLP. That all ranks choose the
same experts needs no message, since they see the same hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kernels import Ops
from kernels.expert_mlp import ExpertMLP
from kernels.packed_linear import (
    Biased,
    GatedWeight,
    LinearWeight,
    PackedExperts,
    pack,
)
from kernels.steps import Buffer, Expert, Gated
from services.worker.models.decoder_layers import GatedMLP
from services.worker.models.recording import Recorder
from services.worker.models.tensor_parallel import TensorParallel, even_share
from services.worker.models.weights import Part, Shard, TensorSource


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A gated MLP that every token goes through, as far as a gate of its own lets it."""

    mlp: GatedMLP  # this rank's share
    gate: LinearWeight  # [1, hidden]
    ops: Ops

    @classmethod
    def read(
        cls, source: TensorSource, prefix: str, mlp: GatedMLP, *, hidden_size: int, ops: Ops
    ) -> Self:
        """Reads the gate `shared_expert_gate` under `prefix`, of the shared expert `mlp`."""
        gate = source.tensor(f"{prefix}.shared_expert_gate.weight", 1, hidden_size)
        return cls(mlp, pack(gate), ops)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns this rank's share of the result, [n_tokens, hidden]."""
        return self.ops.sigmoid_and_mul(self.gate(x), self.mlp.down.weight(self.mlp.gate_up(x)))

    def record(self, to: Recorder, x: Buffer) -> Buffer:
        changed = to.multiply(self.mlp.down.weight, to.gated(self.mlp.gate_up, x))
        return to.sigmoid_and_mul(to.multiply(self.gate, x), changed)


@dataclass(frozen=True, slots=True)
class ExpertMixture:
    """The weighted sum of the gated MLPs that a linear router scores highest for a token."""

    router: LinearWeight  # [n_experts, hidden]
    experts: ExpertMLP  # this rank's share
    n_chosen: int
    normalises: bool  # the weights of those chosen add up to one
    ops: Ops
    shared: SharedExpert | None = None  # beside those chosen
    router_bias: Tensor | None = None  # [n_experts]

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        # As in transformers: scores in the model's element type, everything after in float32.
        scores = self.router(x, self.router_bias)  # [n_tokens, n_experts]
        weights, experts = self.ops.route(scores, self.n_chosen, self.normalises)
        out = self.experts(x, experts, weights)
        if self.shared is not None:
            out += self.shared(x)
        ranks.all_reduce(out)
        return out if residual is None else out.add_(residual)  # [n_tokens, hidden]

    def record(self, to: Recorder, x: Buffer, residual: Buffer | None = None) -> Buffer:
        scores = to.multiply(self.router, x, self.router_bias)
        experts, weights = to.route(scores, self.n_chosen, normalises=self.normalises)
        out = record_experts(to, self.experts, x, experts, weights)
        if self.shared is not None:
            out = to.add(out, self.shared.record(to, x))
        to.all_reduce(out)
        return out if residual is None else to.add(residual, out)


def record_experts(
    to: Recorder, mlps: ExpertMLP, x: Buffer, experts: Buffer, weights: Buffer
) -> Buffer:
    """Adds the steps of `mlps`; those in one matrix are called."""
    if isinstance(mlps, PackedExperts):
        both = zip(mlps.gate_up, mlps.down, strict=True)
        each = [_expert(gate_up, down) for gate_up, down in both]
        return to.run_experts(each, x, experts, weights)
    out = to.buffer(x.width)
    to.call(
        lambda batch, kv, out, *inputs: out.copy_(mlps(*inputs)),
        out, x, experts, weights,
    )  # fmt: skip
    return out


def _expert(gate_up: GatedWeight, down: LinearWeight | Biased) -> Expert:
    """Returns the description of one expert."""
    if isinstance(down, Biased):
        return Expert(Gated.of(gate_up), down.weight, down.bias)
    return Expert(Gated.of(gate_up), down, None)


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
    mlps = read_expert_mlps(
        source,
        f"{prefix}.experts",
        names=names,
        hidden_size=hidden_size,
        size=size,
        n_experts=n_experts,
        ops=ops,
    )
    return ExpertMixture(pack(router), mlps, n_chosen, normalises, ops, shared)


def read_expert_mlps(
    source: TensorSource,
    prefix: str,
    *,
    names: tuple[str, str, str],  # of gate, up and down
    hidden_size: int,
    size: int,
    n_experts: int,
    ops: Ops,
) -> ExpertMLP:
    """Reads this rank's share of the experts 0, 1, ... under `prefix`, each `size` wide inside."""
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
    return source.experts(gate_up, downs, ops)
