"""The angles of a rotary embedding, as a program looks them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True)
class Angles:
    """Tables of the rotary angles of positions 0, 1, ..., in the form that `Ops.rotary` takes.

    The tables may be replaced by longer ones between two runs of a program.
    """

    cos: Tensor  # [n_positions, 1, head_dim]
    signed_sin: Tensor  # [n_positions, 1, head_dim]


class RotaryAngles(Protocol):
    """The angles of one kind of rotary embedding."""

    @property
    def angles(self) -> Angles | None:
        """The tables of angles. None if the embedding has no tables and computes its angles for
        each batch."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cosines and the signed sines [n_tokens, 1, head_dim] of the angles at
        `positions` [n_tokens]."""

    def cover(self, positions: Tensor) -> None:
        """Extends the tables so that they have entries for all `positions`. Does nothing if there
        are no tables."""
