"""Experts in groups are chosen as one token and one expert after the other says."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from kernels.packed_linear import pack
from services.worker.models.group_mixture import GroupRouter, Groups, sigmoid, softmax

N_TOKENS, HIDDEN, N_EXPERTS = 40, 12, 12


def chosen_slowly(router: GroupRouter, scores: Tensor) -> dict[int, float]:
    """The experts of one token and their weights."""
    bias = torch.zeros(N_EXPERTS) if router.bias is None else router.bias
    compared = {expert: float(scores[expert] + bias[expert]) for expert in range(N_EXPERTS)}
    allowed = set(compared)
    if (groups := router.groups) is not None:
        size = N_EXPERTS // groups.n
        members = [list(compared)[i : i + size] for i in range(0, N_EXPERTS, size)]

        def score(group: list[int]) -> float:
            scores = sorted((compared[expert] for expert in group), reverse=True)
            return math.fsum(scores[: groups.n_best])

        best = sorted(members, key=score, reverse=True)[: groups.n_chosen]
        allowed = set(itertools.chain.from_iterable(best))
    experts = sorted(allowed, key=lambda expert: -compared[expert])[: router.n_chosen]
    weights = {expert: float(scores[expert]) for expert in experts}
    total = sum(weights.values()) if router.normalises else 1.0
    return {expert: router.factor * weight / total for expert, weight in weights.items()}


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("normalises", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("score", [softmax, sigmoid])
@pytest.mark.parametrize(
    "groups", [None, Groups(4, 2, 1), Groups(3, 2, 2), Groups(6, 5, 2)], ids=str
)
def test_experts_and_weights(
    groups: Groups | None, score: object, normalises: bool, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(N_EXPERTS, HIDDEN, generator=generator)
    x = torch.randn(N_TOKENS, HIDDEN, generator=generator).bfloat16()
    assert callable(score)
    router = GroupRouter(
        weight=pack(weight),
        score=score,
        groups=groups,
        n_chosen=5 if groups is None or groups.n != 4 else 4,
        normalises=normalises,
        factor=2.5,
        bias=torch.randn(N_EXPERTS, generator=generator) if has_bias else None,
    )
    weights, experts = router(x)
    assert weights.dtype == torch.float32
    logits = x.float() @ weight.t()
    exact = logits.softmax(-1) if score is softmax else torch.sigmoid(logits)
    for token in range(N_TOKENS):
        ours = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert ours == pytest.approx(chosen_slowly(router, exact[token]), rel=1e-4, abs=1e-6)


def test_scores_far_from_zero_are_their_limits() -> None:
    assert sigmoid(torch.tensor([-1e4, -120.0, 0.0, 120.0])).tolist() == [0.0, 0.0, 0.5, 1.0]
