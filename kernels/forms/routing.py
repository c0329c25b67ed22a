"""The parameters of a router that first chooses groups of experts, then experts in these groups."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingForm:
    """The arguments of `Ops.route_in_groups`: how many groups and experts a router chooses for a
    token, and how the chosen experts are weighted.

    Each group is a run of neighbouring experts. All groups have an equal number of experts, which
    is at least `n_best`.
    """

    n_chosen: int  # experts of a token
    is_softmax: bool  # scores are the softmax of the logits; if False, the sigmoid of each logit
    normalises: bool  # the weights of the chosen experts add up to `factor`
    factor: float
    n_groups: int = 1
    n_chosen_groups: int = 1
    n_best: int = 1  # experts whose scores add up to the score of their group
    bias: Tensor | None = None  # [n_experts] float32, added to scores only when experts are chosen
