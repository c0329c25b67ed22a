"""Chooses the experts of every token (top-k routing; Shazeer et al., 2017)."""

from torch import Tensor


def route(scores: Tensor, n_chosen: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights and the experts of every token, [n_tokens, n_chosen] each.

    Those of the highest `scores` [n_tokens, n_experts] are chosen, the highest first; of equal
    scores, any. Weights are float32: the softmax of all scores, or of those chosen if it
    `normalises`. Experts are int64, all different for a token, whatever the scores are.
    """
    weights, experts = scores.float().softmax(-1).topk(n_chosen)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
