"""The form of a layer's attention: how it differs from the plain formula of attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """How one layer's attention differs from the plain formula. The default is the plain
    formula."""

    window: int | None = (
        None  # keys that a query sees, the token's own key included; None: no limit
    )
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim of keys)
    soft_cap: float | None = None  # c: scores s become c * tanh(s / c); None: scores have no cap


PLAIN = AttentionForm()
