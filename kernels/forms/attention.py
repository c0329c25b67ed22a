"""The variants of attention that layers use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The options of one layer's attention: sliding window, scale and soft cap. The default is
    plain scaled dot-product attention."""

    window: int | None = (
        None  # keys that a query sees, the token's own key included; None: no limit
    )
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim of keys)
    soft_cap: float | None = None  # c: scores s become c * tanh(s / c); None: scores have no cap


PLAIN = AttentionForm()
