"""The variants of attention that layers use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The options of one layer's attention: sliding window, scale, soft cap, and whether it is
    causal. The default is plain scaled dot-product attention to the tokens so far."""

    window: int | None = (
        None  # keys that a query sees, the token's own key included; None: no limit
    )
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim of keys)
    soft_cap: float | None = None  # c: scores s become c * tanh(s / c); None: scores have no cap
    is_causal: bool = True  # False: a query also sees the later tokens of its span

    def __post_init__(self) -> None:
        """Raises ValueError if there is a window and attention is not causal. No kernel computes
        such attention."""
        if self.window is not None and not self.is_causal:
            raise ValueError("attention in both directions has no window")


PLAIN = AttentionForm()
