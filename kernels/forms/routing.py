"""How a router chooses experts that lie in groups."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingForm:
    """Says how many groups and experts a router chooses for a token, and what weights it gives
    them. `Ops.route_in_groups` does so.

    Each group is a run of neighbouring experts; all are of one size, `n_best` or more.
    """

    n_chosen: int  # experts of a token
    is_softmax: bool  # scores are shares of one; else each is the sigmoid of its logit
    normalises: bool  # the weights of the chosen experts add up to `factor`
    factor: float
    n_groups: int = 1
    n_chosen_groups: int = 1
    n_best: int = 1  # experts whose scores add up to the score of their group
    bias: Tensor | None = None  # [n_experts] float32, of scores when they are compared
