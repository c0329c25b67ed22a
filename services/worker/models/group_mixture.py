"""A mixture of experts in groups, as DeepSeek's: a token chooses groups, then experts within them.

All choices are made in float32, and weights are the scores of those chosen, times a factor. Beside
them is an MLP that every token goes through, the experts that all share.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import Ops
from kernels.expert_mlp import ExpertMLP
from kernels.group_form import GroupForm
from kernels.packed_linear import LinearWeight
from kernels.steps import Buffer
from services.worker.models.decoder_layers import GatedMLP
from services.worker.models.mixture import record_experts
from services.worker.models.recording import Recorder
from services.worker.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class GroupRouter:
    """Chooses the experts of a token, in the groups that it chooses first."""

    weight: LinearWeight  # [n_experts, hidden], float32
    form: GroupForm
    ops: Ops

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and experts of `x` [n_tokens, hidden], [n_tokens, n_chosen] each."""
        return self.ops.route_in_groups(self.weight(x.float()), self.form)

    def record(self, to: Recorder, x: Buffer) -> tuple[Buffer, Buffer]:
        """Returns the buffers of experts and of their weights."""
        return to.route_in_groups(to.multiply(self.weight, to.widened(x)), self.form)


@dataclass(frozen=True, slots=True)
class GroupMixture:
    """The weighted sum of the experts that a router chooses, and an MLP beside them."""

    router: GroupRouter
    experts: ExpertMLP  # this rank's share
    shared: GatedMLP  # this rank's share

    def __call__(self, x: Tensor, ranks: TensorParallel, residual: Tensor | None = None) -> Tensor:
        weights, experts = self.router(x)
        out = self.experts(x, experts, weights)
        out += self.shared.down.weight(self.shared.gate_up(x))
        ranks.all_reduce(out)
        return out if residual is None else out.add_(residual)  # [n_tokens, hidden]

    def record(self, to: Recorder, x: Buffer, residual: Buffer | None = None) -> Buffer:
        experts, weights = self.router.record(to, x)
        out = record_experts(to, self.experts, x, experts, weights)
        out = to.add(out, to.multiply(self.shared.down.weight, to.gated(self.shared.gate_up, x)))
        to.all_reduce(out)
        return out if residual is None else to.add(residual, out)
