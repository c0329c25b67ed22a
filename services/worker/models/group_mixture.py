"""A mixture of experts in groups, as DeepSeek's: a token chooses groups, then experts within them.

All choices are made in float32, and weights are the scores of those chosen, times a factor. Beside
them is an MLP that every token goes through, the experts that all share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.expert_mlp import ExpertMLP
from kernels.packed_linear import LinearWeight
from services.worker.models.decoder_layers import GatedMLP
from services.worker.models.tensor_parallel import TensorParallel

_NO_SUM = 1e-20  # is added to sums that are divided by, as transformers does


def softmax(logits: Tensor) -> Tensor:
    """Returns shares of one."""
    return logits.softmax(-1)


def sigmoid(logits: Tensor) -> Tensor:
    """Returns `1 / (1 + exp(-logits))`.

    PyTorch's own may give the last elements of a tensor other bits than those before them.
    """
    return torch.exp(-logits).add_(1).reciprocal_()


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of experts that lie side by side, as many in each."""

    n: int
    n_chosen: int
    n_best: int  # experts whose scores add up to the score of their group

    def only_chosen(self, scores: Tensor) -> Tensor:
        """Returns `scores` [n_tokens, n_experts], minus infinity outside of chosen groups."""
        grouped = scores.view(len(scores), self.n, -1)
        of_groups = grouped.topk(self.n_best).values.sum(-1)  # [n_tokens, n]
        chosen = of_groups.topk(self.n_chosen).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, chosen, False)
        return grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRouter:
    """Chooses the experts of a token, in the groups that it chooses first."""

    weight: LinearWeight  # [n_experts, hidden], float32
    score: Callable[[Tensor], Tensor]  # of logits [n_tokens, n_experts]
    groups: Groups | None  # None: all experts are one group
    n_chosen: int
    normalises: bool  # the weights of those chosen add up to `factor`
    factor: float
    bias: Tensor | None = None  # [n_experts] float32, of scores when they are compared

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and experts of `x` [n_tokens, hidden], [n_tokens, n_chosen] each."""
        scores = self.score(self.weight(x.float()))
        compared = scores if self.bias is None else scores + self.bias
        if self.groups is not None:
            compared = self.groups.only_chosen(compared)
        experts = compared.topk(self.n_chosen).indices
        weights = scores.gather(1, experts)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + _NO_SUM)
        return weights * self.factor, experts


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
