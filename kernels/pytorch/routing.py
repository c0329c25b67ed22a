"""Chooses the experts for each token of a batch (routing)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.forms.routing import RoutingForm

_NO_SUM = 1e-20  # added to sums of weights before a division by them, as transformers does


def route(scores: Tensor, n_chosen: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights and the experts of every token, [n_tokens, n_chosen] each (top-k routing;
    Shazeer et al., 2017).

    The experts with the highest `scores` [n_tokens, n_experts] are chosen, in descending order. Of
    equal scores, any may be chosen. Weights are float32: the softmax over all experts' scores,
    divided by the sum of the chosen experts' weights if `normalises`. Experts are int64, and all
    experts of a token are different even if scores are NaN.
    """
    weights, experts = scores.float().softmax(-1).topk(n_chosen)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def route_in_groups(logits: Tensor, form: RoutingForm) -> tuple[Tensor, Tensor]:
    """Returns the weights and the experts of every token, [n_tokens, n_chosen] each. Groups of
    experts are chosen first, then experts in these groups (DeepSeek-AI, 2024).

    `logits` are [n_tokens, n_experts]. Logits, scores and weights are float32. The score of a group
    is the sum of its `n_best` highest scores of experts. The groups with the highest scores are
    chosen, and then the experts with the highest scores in these groups. Of equal scores, any may
    be chosen. The bias is added to scores only for choosing, not for the weights. Experts are
    int64, and all experts of a token are different.
    """
    # PyTorch's sigmoid may round the last elements of a tensor differently from the others.
    sigmoid = torch.exp(-logits).add_(1).reciprocal_()
    scores = logits.softmax(-1) if form.is_softmax else sigmoid
    compared = scores if form.bias is None else scores + form.bias
    if form.n_groups > 1:
        compared = _only_chosen(compared, form)
    experts = compared.topk(form.n_chosen).indices
    weights = scores.gather(1, experts)
    if form.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_SUM)
    return weights * form.factor, experts


def _only_chosen(scores: Tensor, form: RoutingForm) -> Tensor:
    """Returns `scores` [n_tokens, n_experts] with minus infinity for experts that are not in a
    chosen group."""
    grouped = scores.view(len(scores), form.n_groups, -1)
    of_groups = grouped.topk(form.n_best).values.sum(-1)  # [n_tokens, n_groups]
    chosen = of_groups.topk(form.n_chosen_groups).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)
