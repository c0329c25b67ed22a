"""The experts of a layer, in whatever form their matrices are."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ExpertMLP(Protocol):
    """The gated MLPs of all experts of a layer."""

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Returns `sum_i weights[t, i] * mlp of experts[t, i] (x[t])` for every token t.

        `x` is [n_tokens, hidden], `experts` (int64, all different for a token) and `weights` are
        [n_tokens, n_chosen]. The result is [n_tokens, hidden].
        """
