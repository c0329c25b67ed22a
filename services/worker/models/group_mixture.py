"""A mixture of experts in groups, as in DeepSeek: for each token, the router chooses groups, and
then experts in these groups.

Scores and choices are computed in float32. The weight of a chosen expert is its score times a
factor. In some families, the scores of the chosen experts are first divided by their sum. In
addition, every token passes through the shared experts, which are one MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.forms.routing import RoutingForm
from kernels.program import Program
from kernels.steps import Buffer, ExpertMatrices
from kernels.weights.linear import LinearWeight
from services.worker.models.decoder_layers import GatedMLP


@dataclass(frozen=True, slots=True)
class GroupRouter:
    """Chooses groups for each token, then experts in the chosen groups."""

    weight: LinearWeight  # [n_experts, hidden], float32
    form: RoutingForm

    def describe(self, to: Program, x: Buffer) -> tuple[Buffer, Buffer]:
        """Adds the steps of this router to a program, and returns the indices and the weights of
        the chosen experts, [n_tokens, n_chosen] each."""
        return to.route_in_groups(to.multiply(self.weight, to.widened(x)), self.form)


@dataclass(frozen=True, slots=True)
class GroupMixture:
    """A mixture layer: the weighted sum of the chosen experts, plus the result of the shared
    experts."""

    router: GroupRouter
    experts: ExpertMatrices  # this rank's share
    shared: GatedMLP  # this rank's share

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps to a program, as `MLP.describe` specifies."""
        experts, weights = self.router.describe(to, x)
        out = to.run_experts(self.experts, x, experts, weights)
        out = to.add(out, self.shared.describe_share(to, x))
        to.all_reduce(out)
        return out if residual is None else to.add(residual, out)
