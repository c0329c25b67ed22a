"""The form of a layer's attention: what it computes beside the plain formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The form of one layer's attention; the default is the plain formula."""

    window: int | None = None  # keys that a query sees, its own among them; None: all before it
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim), that of keys
    soft_cap: float | None = None  # c: scores s become c * tanh(s / c); None: they stay


PLAIN = AttentionForm()
